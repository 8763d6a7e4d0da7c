"""Documents to token ids: templates, loss masks, special tokens, and the store on disk."""
