"""Token ids to rows of a training step: packed, shuffled, found by number or streamed."""
