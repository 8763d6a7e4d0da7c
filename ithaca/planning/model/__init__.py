"""A model's sizes from its config alone, without torch or transformers."""
