"""What stands for parts of a rehearsed step where tensors are fake: nothing can be read of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ithaca.sequence.batch import Shard

# Smaller tensors are not kept in 8 bits.
_CODED = 4096


def fake_step(optimizer: torch.optim.Optimizer) -> None:
    """torchao steps by compiled code, which takes no fake tensors: there its state is made and no more."""
    make = getattr(optimizer, "_new_buffer", None)
    if make is None:
        optimizer.step()
        return
    with unset_fake_temporarily():
        # The values that codes stand for are worked out once, and kept.
        for signed in (True, False):
            make(torch.zeros(_CODED), signed)
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        state = optimizer.state[parameter]
        for name, signed in zip(("exp_avg", "exp_avg_sq"), (True, False), strict=True):
            if name not in state:
                state[name] = make(parameter, signed)


def faked(shard: Shard, mode: FakeTensorMode) -> Shard:
    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    inputs = {key: fake(value) for key, value in shard.inputs.items()}
    return replace(shard, inputs=inputs, targets=fake(shard.targets), real=fake(shard.real))
