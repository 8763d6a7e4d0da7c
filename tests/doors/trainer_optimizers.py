"""Habits of Trainer's users around optimizers: names of `optim`, classes of torch's, classes of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import optim

from tests.doors.habits import Habit, exact, refused
from tests.doors.trainer_scripts import train

DOOR = "Trainer, optimizers"
# The names of `optim` that need no package beside ours; those that do end in transformers' own words, which name it.
NAMES = ("adamw_torch_fused", "adagrad")
CODED = 'use `optim="adamw_torch"`; `ithaca train` and `ithaca.build_optimizer` have 8-bit moments'
CLASSES = (optim.Adadelta, optim.Adagrad, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.Rprop)


class TrustRatio(torch.optim.Optimizer):
    """Scales a step by the norms of a weight and of its gradient, as LARS and LAMB do; `norm` says how they are read."""

    norm: Callable[[torch.Tensor], Any] = staticmethod(torch.Tensor.norm)

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (self.norm(p) / (self.norm(p.grad) + 1e-8)), alpha=-group["lr"])


class ReadTrustRatio(TrustRatio):
    norm = staticmethod(lambda tensor: tensor.norm().item())


def stepped(sp: int | None, *, kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    return train(sp, optimizer_cls_and_kwargs=(kind, {"lr": 1e-2}))


HABITS: list[Habit] = [
    *(exact(DOOR, f'`optim="{name}"`', partial(train, optim=name), slow=True) for name in NAMES),
    *(exact(DOOR, f"torch's {kind.__name__}", partial(stepped, kind=kind), slow=True) for kind in CLASSES),
    exact(DOOR, "norms of weights in one's own optimizer", partial(stepped, kind=TrustRatio), slow=True),
    *(
        refused(DOOR, f'`optim="{name}"`', partial(train, optim=name), says="codes blocks of numbers", note=CODED)
        for name in ("adamw_torch_8bit", "adamw_torch_4bit")
    ),
    refused(
        DOOR, "the same norms as Python numbers", partial(stepped, kind=ReadTrustRatio),
        says=r"call .full_tensor\(\) on it first, on every rank", note="keep tensors, or take `full_tensor()`",
    ),
]  # fmt: skip
