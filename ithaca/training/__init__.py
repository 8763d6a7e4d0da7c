"""What happens in a training step."""
