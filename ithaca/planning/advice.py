"""Text about memory: a plan's terms as a table, and what to change when nothing fits."""
