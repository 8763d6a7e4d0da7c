"""Checks and timings of this machine: `ithaca doctor` and `ithaca plan --calibrate`."""
