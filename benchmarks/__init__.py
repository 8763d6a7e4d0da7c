"""Programs that measure: each writes JSON with hardware and versions, and prints a table last."""
