"""A Trainer script with sequence parallelism: the one changed line is marked.

    torchrun --nproc-per-node 2 examples/trainer.py

Runs anywhere: two CPU processes, or one process a GPU. The model is small and made on the spot.
"""

from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

import ithaca

set_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
text = Path(__file__).read_bytes()
pieces = [list(text[start : start + 400]) for start in range(0, len(text) - 400, 200)]
dataset = Dataset.from_list([{"input_ids": piece, "labels": piece} for piece in pieces])

trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=TrainingArguments(
        "trainer_model",
        max_steps=10,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        parallelism_config=ithaca.UlyssesConfig(sp_size=2),  # the one line: every row is split over two ranks
    ),
    train_dataset=dataset,
    eval_dataset=dataset.select(range(4)),
    data_collator=default_data_collator,
)
trainer.train()
trainer.evaluate()
trainer.save_model()  # a folder AutoModelForCausalLM loads
trainer.end()
