"""`ithaca train` on a rank: stages, the training loop, the watchdog, and the files of a run."""
