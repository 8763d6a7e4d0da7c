"""`build_optimizer`: three kinds of AdamW over plain or FSDP2-sharded parameters, and the optimizer step in backward.

    adamw      torch's fused AdamW: two moments in the weight's dtype
    adamw8bit  torchao's: both moments in 8 bits, a scale for each 256 numbers; small or odd shards are not quantized
    bf16_sr    torchao's: bf16 weights and moments with stochastic rounding, so that changes too small for bf16 still
               happen, as often as they should

Weight decay applies to matrices, not to norms, biases and other vectors. Frozen parameters are left out.

Invariant: ranks that hold copies of the same weights keep them equal. Stochastic rounding therefore draws from a
separate stream, seeded by the seed, the shard and the step; the generators of dropout stay untouched.

With `in_backward` a parameter is stepped and its gradient freed as soon as the gradient is reduced, so the gradients
never exist all at once. FSDP2 calls a sharded parameter's hooks after its reduction, on the stream that reduced it, and
ends backward after the hooks. Clipping, accumulation and skipped steps need all gradients first and are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ithaca.arguments import check_flag, check_kind, named_arguments, shown
from ithaca.errors import UnsupportedError
from ithaca.handle import handle_of
from ithaca.planning.memory_plan import Optimizer as Name
from ithaca.quantities import finite_or_nan
from ithaca.state.optimizer.existing_optimizers import FOLLOWER
from ithaca.state.optimizer.whole_step import CODES_SHARDS
from ithaca.state.weights.placement import averages_gradients

NAMES = tuple(name for name in get_args(Name) if name != "none")
_DTYPES = {
    "adamw": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "adamw8bit": (torch.float32, torch.bfloat16, torch.float16),
    "bf16_sr": (torch.bfloat16,),
}
# Smallest decay of a bf16 moment: a step that changes the moment by a smaller share is rounded back, for ever.
_LEAST_DECAY = 2**-8


@named_arguments
def build_optimizer(
    model: nn.Module,
    name: Name = "adamw",
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    seed: int = 0,
    in_backward: bool = False,
    clips: bool = False,
    accumulates: bool = False,
    skips_bad_steps: bool = False,
) -> torch.optim.Optimizer:
    """Return an optimizer of the trained parameters; call it after `parallelize`, with the same name as there.

    `in_backward`: step each parameter in backward; `optimizer.step()` is still called after every backward, and ends
    the step. `clips`, `accumulates` and `skips_bad_steps` describe the caller's loop, and are refused with `in_backward`.
    `weight_decay` leaves out biases and the weights of norms. `seed`: the seed of stochastic rounding.
    """
    _check_settings(model, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, betas)
    _check_name(name, betas)
    check_kind("seed", seed, int, "pass a whole number, the same on every rank")
    flags = {"in_backward": in_backward, "clips": clips, "accumulates": accumulates, "skips_bad_steps": skips_bad_steps}
    for key, flag in flags.items():
        check_flag(key, flag)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    _check_parameters(name, trained)
    if in_backward:
        _check_in_backward(model, trained, clips=clips, accumulates=accumulates, skips_bad_steps=skips_bad_steps)
    settings = {"lr": lr, "betas": betas, "eps": eps}
    optimizer = _make(name, _groups(trained, weight_decay), settings)
    if name != "adamw":
        _WithoutCodeCache(optimizer).install()
    if name == "bf16_sr":
        _Rounding(optimizer, {p: number for number, p in enumerate(trained.values())}, seed).install()
    if in_backward:
        _InBackward(optimizer, {p: key for key, p in trained.items()}).install()
    handle = handle_of(model)
    if handle is not None:
        handle.steps_by(optimizer)
    return optimizer


def _make(name: Name, groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **settings)
    try:
        low_bit: Any = import_module("torchao.optim")
    except ImportError as error:
        raise UnsupportedError(
            f"optimizer {name!r} is torchao's, which cannot be imported ({error}): pip install 'ithaca[torchao]', or "
            "use 'adamw'"
        ) from error
    if name == "adamw8bit":
        return low_bit.AdamW8bit(groups, **settings)
    # torchao's AdamW with stochastic rounding and unquantized moments has no public name (torchao 0.16 and newer).
    return low_bit._AdamW(groups, bf16_stochastic_round=True, **settings)


def _groups(trained: dict[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: matrices with weight decay, vectors without."""
    # By name too: biases of stacked experts and norms by head are matrices.
    owners = {key: key.rpartition(".")[0].rpartition(".")[2].lower() for key in trained}
    vectors = {key for key, p in trained.items() if p.ndim < 2 or key.endswith("bias") or "norm" in owners[key]}
    groups = [
        {"params": [p for key, p in trained.items() if key not in vectors], "weight_decay": weight_decay},
        {"params": [p for key, p in trained.items() if key in vectors], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check_settings(model: object, numbers: dict[str, float], betas: object) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"build_optimizer was given {shown(model)}: pass the model itself")
    for key, value in numbers.items():
        if not finite_or_nan(value) >= 0:
            raise UnsupportedError(f"{key}={shown(value)}: a number of at least 0 is needed, such as {key}=1e-5")
    if (
        not isinstance(betas, tuple | list)
        or len(betas) != 2
        or not all(0 <= finite_or_nan(beta) < 1 for beta in betas)
    ):
        raise UnsupportedError(
            f"betas={shown(betas)}: two numbers of at least 0 and below 1 are needed, such as (0.9, 0.95)"
        )


def _check_name(name: Name, betas: tuple[float, float]) -> None:
    if name == "none":
        raise UnsupportedError(f"optimizer 'none' is a word for plans: there is nothing to build; use {_or(NAMES)}")
    if name not in NAMES:
        raise UnsupportedError(f"optimizer {shown(name)}: choose one of {', '.join(NAMES)}")
    if name == "bf16_sr" and 1 - max(betas) < _LEAST_DECAY:
        raise UnsupportedError(
            f"betas={betas} with 'bf16_sr': its moments are bf16 and would never fall again: use betas of at most "
            f"{1 - _LEAST_DECAY:.3f}, (0.9, 0.95) for example, or 'adamw8bit'"
        )


def _check_parameters(name: Name, trained: dict[str, nn.Parameter]) -> None:
    if not trained:
        raise UnsupportedError("no parameter of the model wants a gradient: unfreeze some, or add adapters")
    allowed = _DTYPES[name]
    for key, parameter in trained.items():
        if parameter.dtype not in allowed:
            needed = _or(str(dtype).removeprefix("torch.") for dtype in allowed)
            fits = next((other for other in NAMES if parameter.dtype in _DTYPES[other]), None)
            instead = f", or use {fits!r}" if fits else ""
            raise UnsupportedError(f"optimizer {name!r} with {key} in {parameter.dtype}: load it in {needed}{instead}")


def _check_in_backward(
    model: nn.Module, trained: dict[str, nn.Parameter], *, clips: bool, accumulates: bool, skips_bad_steps: bool
) -> None:
    refusals = {
        "clipping needs the norm of all gradients before the first step: clip nothing": clips,
        "accumulation needs all micro-batches' gradients before the first step: use one micro-batch a step": accumulates,
        "a bad step cannot be skipped once its first parameter is stepped: let bad steps stand": skips_bad_steps,
    }
    for reason, given in refusals.items():
        if given:
            raise UnsupportedError(f"in_backward=True: {reason}, or use in_backward=False")
    if averages_gradients(model) and dist.is_initialized() and dist.get_world_size() > 1:
        raise UnsupportedError(
            "in_backward=True with weights of your own wrapper, which reduces gradients after they are stepped: use "
            "weights='shard' or 'replicate', or in_backward=False"
        )
    if any(_is_on_host(p) for p in trained.values()) and torch.__version__ < "2.13":
        raise UnsupportedError(
            f"in_backward=True with gradients on the host: torch {torch.__version__} steps before they have arrived "
            "there: use torch 2.13 or newer, on_host='nothing', or in_backward=False"
        )


def _is_on_host(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type


def _or(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(eq=False, slots=True)
class _InBackward:
    """Steps one parameter at a time, with an optimizer that keeps its groups and state."""

    optimizer: torch.optim.Optimizer
    names: dict[nn.Parameter, str]
    stepped: set[nn.Parameter] = field(default_factory=set)
    inside: bool = False

    def install(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._take, number))
        self.optimizer.register_step_pre_hook(self._end)

    def _take(self, group: int, parameter: nn.Parameter) -> None:
        if parameter in self.stepped:
            raise UnsupportedError(
                f"in_backward=True: a second gradient of {self.names[parameter]} came before optimizer.step(), and the "
                "first has been stepped: call it after every backward, or use in_backward=False"
            )
        self.stepped.add(parameter)
        self._step_alone(group, parameter)
        parameter.grad = None

    def _step_alone(self, own: int, parameter: nn.Parameter) -> None:
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        for at, group in enumerate(groups):
            group["params"] = [parameter] if at == own else []
        self.inside = True
        try:
            self.optimizer.step()
        finally:
            self.inside = False
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def _end(self, *_: Any) -> None:
        """End the step: the caller's own `step()` finds no gradients, and later gradients belong to the next step."""
        if not self.inside:
            self.stepped.clear()


@dataclass(eq=False, slots=True)
class _WithoutCodeCache:
    """Switches off torch's cache of compiled code during torchao's compiled steps.

    The cache identifies a sharded parameter by its whole shape: a rank whose shard is a row shorter would get another
    rank's code. A false hit of that kind is https://github.com/pytorch/pytorch/issues/188390
    """

    optimizer: torch.optim.Optimizer
    switched_off: ExitStack = field(default_factory=ExitStack)

    def install(self) -> None:
        self.optimizer.__dict__[CODES_SHARDS] = True
        self.optimizer.register_step_pre_hook(self._begin)
        self.optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: Any) -> None:
        # Private, checked with torch 2.11 to 2.13.
        self.switched_off.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))

    def _end(self, *_: Any) -> None:
        self.switched_off.close()


@dataclass(eq=False, slots=True)
class _Rounding:
    """Seeds the generators for each step of stochastic rounding, equally on all ranks that hold the same shard."""

    optimizer: torch.optim.Optimizer
    numbers: dict[nn.Parameter, int]
    seed: int
    forked: ExitStack = field(default_factory=ExitStack)

    def install(self) -> None:
        self.optimizer.register_step_pre_hook(self._begin)
        self.optimizer.register_step_post_hook(self._end)
        self.optimizer.__dict__[FOLLOWER] = self._follow

    def _follow(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        self.numbers = {moved.get(p, p): number for p, number in self.numbers.items()}

    def _begin(self, *_: Any) -> None:
        groups = self.optimizer.param_groups
        first = next((p for group in groups for p in group["params"] if p.grad is not None), None)
        if first is None:
            return
        # The step count is part of the optimizer's state, so a resumed run draws the same numbers.
        steps = int(self.optimizer.state[first].get("step", 0))
        devices = [first.device] if first.device.type == "cuda" else []
        self.forked.enter_context(torch.random.fork_rng(devices=devices))
        torch.manual_seed(_mix(self.seed, *_shard_of(first), self.numbers[first], steps))

    def _end(self, *_: Any) -> None:
        self.forked.close()


def _shard_of(parameter: nn.Parameter) -> list[int]:
    """Return the mesh coordinates of this rank's shard, equal on all ranks that hold a copy of the shard."""
    if not isinstance(parameter, DTensor):
        return []
    where: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    return [at for at, placement in zip(where, parameter.placements, strict=True) if placement.is_shard()]


def _mix(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
