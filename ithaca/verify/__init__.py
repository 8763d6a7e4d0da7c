"""`ithaca verify`: the same model, sharded and in one process, compared number by number."""
