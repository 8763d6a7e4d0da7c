"""Parts of a rehearsed step on fake tensors, whose values cannot be read: the optimizer's step, and a batch's shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ithaca.sequence.batch import Shard

# torchao keeps the moments of smaller tensors in fp32 (checked on 0.18).
_LEAST_QUANTIZED = 4096


def fake_step(optimizer: torch.optim.Optimizer) -> None:
    """Step on fake tensors; torchao's compiled step takes none, so only its state is made."""
    make = getattr(optimizer, "_new_buffer", None)
    if make is None:
        optimizer.step()
        return
    with unset_fake_temporarily():
        # torchao computes its table of quantized values once and caches it: the table must be real.
        for signed in (True, False):
            make(torch.zeros(_LEAST_QUANTIZED), signed)
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        state = optimizer.state[parameter]
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if name not in state:
                state[name] = make(parameter, signed)


def fake_shard(shard: Shard, mode: FakeTensorMode) -> Shard:
    """Return a shard with fake tensors of the same shapes."""

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    inputs = {key: fake(value) for key, value in shard.inputs.items()}
    return replace(shard, inputs=inputs, targets=fake(shard.targets), real=fake(shard.real))
