"""An Accelerator loop with sequence parallelism: the one changed line is marked.

    torchrun --nproc-per-node 2 examples/accelerator.py

Runs anywhere: two CPU processes, or one process a GPU. The model is small and made on the spot.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

import ithaca

set_seed(0)
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    parallelism_config=ithaca.UlyssesConfig(sp_size=2),  # the one line: every row is split over two ranks
)
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
text = Path(__file__).read_bytes()
pieces = [list(text[start : start + 400]) for start in range(0, len(text) - 400, 50)]
rows = [{"input_ids": piece, "labels": piece} for piece in pieces]

model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(rows, batch_size=2, shuffle=True, collate_fn=default_data_collator)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for step, batch in zip(range(10), loader, strict=False):
    loss = model(**batch).loss  # whole batches in, the token mean over all ranks out
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.4f}")

accelerator.unwrap_model(model).save_pretrained("accelerator_model")  # every rank calls it, rank 0 writes
accelerator.end_training()
