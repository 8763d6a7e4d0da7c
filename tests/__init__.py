"""The tests, as a package: ranks find a test's functions by the name `tests.<folder>.<module>`."""
