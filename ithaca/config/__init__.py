"""The run file: its schema, the overrides laid over it, and messages about mistakes in it."""
