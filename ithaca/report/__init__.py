"""Tables and pictures from a run's files."""
