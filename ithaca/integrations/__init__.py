"""Hugging Face's own loops (Trainer, SFTTrainer, Accelerator) over Ithaca: one argument, nothing else changed."""
