"""Checkpoints: named tensors by torch's distributed checkpointing, proven whole by a manifest."""
