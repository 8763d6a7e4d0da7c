"""Small configs of every architecture, for proofs that need no weights."""
