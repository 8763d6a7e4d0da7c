"""Documents to tokens to rows: files are found, tokenized once into a cache, and packed into rows found by number."""
