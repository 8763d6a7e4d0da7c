"""The watchdog: progress, hangs, signals and the distance between host and device."""
