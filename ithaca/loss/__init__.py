"""Losses over shards: the causal loss with its one division, a user's own loss, and the loss by position."""
