"""Functions of tensors and groups: kernels, the exchange, Ulysses."""
