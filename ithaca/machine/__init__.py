"""What this machine can do: `ithaca doctor` and `ithaca plan --calibrate`."""
