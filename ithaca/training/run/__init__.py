"""The files and the display of one run: its folder, metrics, progress and changed settings."""
