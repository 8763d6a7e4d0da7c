"""Sizes of a model, derived from its config alone, without torch or transformers."""
