"""A plain PyTorch loop with sequence parallelism: the five changed lines are marked.

    torchrun --nproc-per-node 2 examples/plain_pytorch.py

Runs anywhere: two CPU processes, or one process a GPU. The model is small and made on the spot.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ithaca

torch.manual_seed(0)  # one seed on all ranks: the same model; a dropout still draws anew for every shard of a row
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
mesh = ithaca.init_mesh(sp=2)  # 1: every row is split over two ranks
model = ithaca.parallelize(LlamaForCausalLM(config), mesh)  # 2: attention and FSDP2
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
collate = ithaca.SequenceCollator(pack=True, length=512)  # 3: packs, pads, masks

text = torch.tensor(list(Path(__file__).read_bytes()))
documents = [{"input_ids": piece} for piece in text.split(300)]

for step in range(10):
    batch = collate(documents)  # the whole batch, the same on every rank of a sequence group
    loss = ithaca.causal_loss(model, batch, mesh)  # 4: pads, shards, runs; the global token mean
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

ithaca.save_pretrained(model, "plain_pytorch_model")  # 5: a folder AutoModelForCausalLM loads
torch.distributed.destroy_process_group()
