"""Hugging Face folders: configs, tokenizers and safetensors, read into shards and written from them."""
