"""Losses over shards: the causal loss with its one division, a user's own, and loss by position."""
