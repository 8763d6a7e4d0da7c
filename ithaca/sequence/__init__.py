"""Where each token lives: the layout of a batch, its shards, and a collator that makes batches."""
