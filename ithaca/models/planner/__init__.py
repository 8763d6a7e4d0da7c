"""The memory plan of a model at hand: its sizes, the choice at the first batch, out-of-memory messages."""
