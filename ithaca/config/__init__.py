"""The run file: its schema, what is laid over it, and messages about mistakes in it."""
