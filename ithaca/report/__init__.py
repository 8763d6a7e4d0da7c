"""Pictures and pages from a run's files, and from plans."""
