"""Optimizers that read a weight as a whole, over weights that are sharded: one weight at a time is gathered and stepped.

AdamW, SGD and most others treat every number alone, so a shard is stepped as it stands. Adafactor keeps means of a
matrix's rows and columns and scales by the weight's norm, Muon makes a matrix orthogonal: over a shard both would be
another optimizer. Here each weight and its gradient are gathered in turn, all ranks make the same step on the whole, and
each keeps its shard. What it costs: one all-gather of weights and gradients a step, room for the largest weight twice,
and state that is whole on every rank (Adafactor's is small).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ithaca.state.load import bounds

# By name: transformers has an Adafactor of its own. As of torch 2.13 and transformers 5.23.
_READ_WHOLE = ("Adafactor", "Muon")


def reads_whole(optimizer: Optimizer) -> bool:
    """True if a step of this optimizer is not done number by number."""
    return any(own.__name__ in _READ_WHOLE for own in type(optimizer).__mro__)


def step_whole(optimizer: Optimizer) -> None:
    """Let this one optimizer step whole weights; its groups, schedulers and hooks stay as they are."""
    own = type(optimizer)
    if issubclass(own, _StepsWhole):
        return
    step: Any = _StepsWhole.step
    made = type(
        own.__name__, (_StepsWhole, own), {"__module__": own.__module__, "step": Optimizer.profile_hook_step(step)}
    )
    made.step.hooked = True  # type: ignore[attr-defined]
    optimizer.__class__ = made
    _keep_tracked(optimizer)


class _StepsWhole(Optimizer):
    """Before the optimizer's own class in the order of classes."""

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_one(group, parameter)
        finally:
            self.param_groups = groups
        return loss

    @torch.no_grad()
    def _step_one(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        # A tensor of its own: what the optimizer does to it in place is done to no other.
        stepped = nn.Parameter(whole.detach().clone())
        stepped.grad = gradient
        if parameter in self.state:
            self.state[stepped] = self.state.pop(parameter)
        self.param_groups = [{**group, "params": [stepped]}]
        _own_step(type(self))(self)
        if stepped in self.state:
            self.state[parameter] = self.state.pop(stepped)
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        mine.copy_(stepped[bounds(parameter)])


def _own_step(made: type) -> Any:
    """The optimizer's own step without the hooks that torch puts around one: they belong to the step of all weights."""
    step = next(own for own in made.__mro__ if "step" in own.__dict__ and not issubclass(own, _StepsWhole)).__dict__[
        "step"
    ]
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _keep_tracked(optimizer: Optimizer) -> None:
    """A scheduler that was made before has put a method of the old class on the optimizer, to see that it steps."""
    if "step" not in optimizer.__dict__:
        return
    del optimizer.__dict__["step"]
    step = optimizer.step

    @wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = tracked  # type: ignore[method-assign]
