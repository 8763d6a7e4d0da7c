"""Documents to tokens to rows: found, read, tokenized once into a cache, laid out by a plan, resumable anywhere."""
