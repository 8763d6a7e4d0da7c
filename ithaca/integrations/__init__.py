"""Sequence parallelism under Hugging Face's own loops (Trainer, SFTTrainer, Accelerator), by one argument."""
