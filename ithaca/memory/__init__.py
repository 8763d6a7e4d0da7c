"""One device holds more: the loss, and what keeps activations small."""
