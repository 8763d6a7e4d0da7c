"""Terms of a step: memory, time and traffic, one file each."""
