"""A user's loop on two ranks; `make.py` ran it with an earlier version, the tests run it with this one.

    torchrun --nproc-per-node 2 loop.py [STATE]

Reads `model/` in the working folder; takes three steps and keeps weights and optimizer in `state.pt`, then three more,
whose losses it writes to `losses.json`. With STATE it begins behind the first three.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM

import ithaca

WHOLE = {"full_state_dict": True, "cpu_offload": True}
rows = torch.tensor([[3 + (place * step) % 50 for place in range(32)] for step in range(1, 7)])
mesh = ithaca.init_mesh(sp=2, device="cpu")
model: Any = ithaca.parallelize(AutoModelForCausalLM.from_pretrained("model"), mesh)
optimizer = ithaca.build_optimizer(model, "adamw", lr=3e-3)
first = 0
if len(sys.argv) > 1:
    state = torch.load(sys.argv[1])
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    first = 3
losses = []
for step in range(first, 6):
    if step == 3 and first == 0:
        weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(**WHOLE))
        if mesh.rank == 0:
            torch.save({"model": weights, "optimizer": moments}, "state.pt")
    loss = ithaca.causal_loss(model, {"input_ids": rows[step : step + 1], "labels": rows[step : step + 1]}, mesh)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
if mesh.rank == 0:
    Path("losses.json").write_text(json.dumps(losses[-3:]))
dist.destroy_process_group()
