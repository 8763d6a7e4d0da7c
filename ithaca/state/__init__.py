"""Weights and what is kept of them: FSDP2, and standard safetensors."""
