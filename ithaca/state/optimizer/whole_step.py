"""Steps of whole weights for optimizers that do not work element by element, such as Adafactor and Muon.

AdamW, SGD and most others are elementwise, so they step a shard as it is. Adafactor keeps means of a matrix's rows and
columns and Muon makes a matrix orthogonal: over a shard both would be another optimizer. For them

    for each weight:   all-gather weight and gradient -> the optimizer's own step on the whole -> keep this rank's shard

The cost is one all-gather of weights and gradients a step, memory for the largest weight twice, and state that is whole
on every rank (Adafactor's is small).

Trainer integrations pass their optimizer to `step_whole`. An optimizer of a plain loop is unknown before its first step,
so a hook that torch calls before every optimizer's step does the same. An optimizer that reads all weights as one vector
(LBFGS) is refused.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ithaca.errors import UnsupportedError
from ithaca.state.optimizer.existing_optimizers import cut_loaded_state
from ithaca.state.weights.partial_values import is_spread
from ithaca.state.weights.shards import bounds

# By name: transformers has an Adafactor of its own. Rprop writes by index, which DTensor refuses. As of torch 2.13 and
# transformers 5.23.
_READ_WHOLE = ("Adafactor", "Muon", "Rprop")
_READ_ALL = ("LBFGS",)
# torchao's, which quantize blocks of 128 or 256 numbers: a shard's blocks are not those of the whole weight.
_CODE_BLOCKS = ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8")
# Their fused kernels take no DTensor; Adam's and AdamW's do.
_FUSED_ALONE = ("SGD", "Adagrad")
# Attribute of torchao optimizers that `build_optimizer` made, whose blocks are the shards'.
CODES_SHARDS = "_ithaca_codes_shards"


def needs_whole_weights(optimizer: Optimizer) -> bool:
    """True if a step of this optimizer is not elementwise."""
    return _is_one_of(optimizer, _READ_WHOLE)


def _is_one_of(optimizer: Optimizer, names: tuple[str, ...]) -> bool:
    return any(own.__name__ in names for own in type(optimizer).__mro__)


@cache
def watch_steps() -> None:
    """Register a hook, once, by which every optimizer of sharded weights steps as on one process, or is refused."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return arguments that replace a step of sharded weights by a step of whole weights; None to leave the step alone.

    torch lets a hook exchange the arguments of `step` only. So the step runs on an optimizer without weights, whose
    closure steps the whole weights.
    """
    fused = _is_one_of(optimizer, _FUSED_ALONE) and any(group.get("fused") for group in optimizer.param_groups)
    coded = _is_one_of(optimizer, _CODE_BLOCKS) and CODES_SHARDS not in optimizer.__dict__
    special = fused or coded or _is_one_of(optimizer, _READ_WHOLE + _READ_ALL)
    if isinstance(optimizer, _StepsWhole):
        return None
    if not special:
        cut_loaded_state(optimizer)
        return None
    if not any(is_spread(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        return None
    name = type(optimizer).__name__
    if fused:
        raise UnsupportedError(f"{name}(fused=True) cannot step weights that are spread over ranks: pass foreach=True")
    if coded:
        raise UnsupportedError(
            f"{name} codes blocks of numbers of whole weights, and a rank has parts: make it by "
            "ithaca.build_optimizer(model, 'adamw8bit', lr=...), which codes shards, or use AdamW"
        )
    if _is_one_of(optimizer, _READ_ALL):
        raise UnsupportedError(
            f"{name} reads all weights as one vector, and these are spread over ranks: use another optimizer, such as "
            "ithaca.build_optimizer(model, lr=...), or pass weights='none' to parallelize"
        )
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    step: Any = _StepsWhole.step
    empty = object.__new__(type(optimizer))
    empty.__dict__.update(optimizer.__dict__, param_groups=[], state=defaultdict(dict))
    return (empty, lambda: step(optimizer, closure)), {}


def step_whole(optimizer: Optimizer) -> None:
    """Make one optimizer step whole weights; its groups, schedulers and hooks stay."""
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
    """Mixin whose `step` comes before the optimizer's own in the method resolution order."""

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
                        _step_one(self, group, parameter)
        finally:
            self.param_groups = groups
        return loss


@torch.no_grad()
def _step_one(optimizer: Any, group: dict[str, Any], parameter: nn.Parameter) -> None:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    # A separate tensor, since the optimizer changes it in place.
    stepped = nn.Parameter(whole.detach().clone())
    stepped.grad = gradient
    if parameter in optimizer.state:
        optimizer.state[stepped] = optimizer.state.pop(parameter)
    optimizer.param_groups = [{**group, "params": [stepped]}]
    _own_step(type(optimizer))(optimizer)
    if stepped in optimizer.state:
        optimizer.state[parameter] = optimizer.state.pop(stepped)
    mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    mine.copy_(stepped[bounds(parameter)])


def _own_step(made: type) -> Any:
    """Return the optimizer's own step without torch's hooks, which run around the step of all weights."""
    step = next(own for own in made.__mro__ if "step" in own.__dict__ and not issubclass(own, _StepsWhole)).__dict__[
        "step"
    ]
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _keep_tracked(optimizer: Optimizer) -> None:
    """Put a scheduler's tracking of `step` on the new class's method.

    A scheduler patches `optimizer.step` to see that the optimizer steps (`_opt_called`, `_wrapped_by_lr_sched`: private,
    torch 2.11 to 2.13). A scheduler made before has patched the old class's method.
    """
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
