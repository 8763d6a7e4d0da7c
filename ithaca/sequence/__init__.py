"""Layout of a batch over ranks: documents, shards, the agreement of ranks on a batch, and a collator."""
