"""Survey: a measured verdict on every causal-LM type of the installed transformers."""
