"""Facts about an architecture found by watching one run of a few tokens on the meta device."""
