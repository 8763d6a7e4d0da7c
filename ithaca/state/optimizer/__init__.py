"""Optimizers over split weights: built, stepped with clipping, kept on the host."""
