"""Activation memory: checkpointing that keeps attention, tiles, offloading to the host, the loss in tiles."""
