"""Checkpoints: named tensors by torch's distributed checkpointing, verified by a manifest of checksums."""
