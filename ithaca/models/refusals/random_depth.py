"""Refusal of stochastic depth and layer dropout: each rank would draw for itself which layers run.

Ranks of a sequence group exchange heads in every layer. If one rank skips a layer that the others run, they wait forever
for its heads. Noise on single tokens (dropout, a router's jitter) is allowed, because ranks hold different tokens.

Two checks run before the first layer. Rates are read from modules by name, at `parallelize` and at each training step,
because a rate may be set in between. In an architecture that the survey has not measured, the code of each module is read
too: a module that draws from torch's, Python's or NumPy's generator is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ithaca.errors import UnsupportedError

_RATE = re.compile(r"layer_?drop|drop_?path|path_?drop|stochastic_depth|drop_?connect|survival_prob", re.IGNORECASE)
# Rates at which layers stay instead of being dropped: 1 keeps all.
_KEEPS = re.compile(r"survival", re.IGNORECASE)
# Functions that draw whole tensors or single numbers. Noise of a tensor's own shape (rand_like, uniform_) is per token.
_DRAWS = frozenset(("rand", "randn", "randint", "randperm", "bernoulli", "bernoulli_", "random", "choice", "gauss"))
# Methods that only initialize weights.
_FILLS = ("__init__", "_init_weights", "reset_parameters", "init_weights")


def refuse_dropped_layers(base: PreTrainedModel, *, measured: bool) -> None:
    """Refuse a model in which random numbers may decide which layers run. `measured`: the survey knows its code."""
    for name, module in base.named_modules():
        for key, value in _rates(module):
            raise _refused(f"{name}.{key}" if name else key, key, value)
    for key, value in vars(base.config.get_text_config()).items():
        if _RATE.search(key) and _drops(key, value):
            raise _refused(f"config.{key}", key, value)
    modules = () if measured else base.modules()
    drawing = next((m for m in modules for code in _own_code(type(m)) if not _DRAWS.isdisjoint(code.co_names)), None)
    if drawing is not None:
        raise UnsupportedError(
            f"{type(drawing).__name__} draws random numbers in its code, and each rank would draw its own, so a draw for whole "
            "rows or layers would differ: nn.Dropout and noise of a tensor's own shape (rand_like) are taken"
        )


def watch_rates(model: PreTrainedModel) -> list[Any]:
    """Hook the model so that a rate set later is refused in training; return the hooks' handles."""
    holders = [(name, module) for name, module in model.named_modules() if any(map(_RATE.search, vars(module)))]

    def refuse(model: nn.Module, args: Any) -> None:
        for name, module in holders:
            if module.training:
                for key, value in _rates(module):
                    raise _refused(f"{name}.{key}" if name else key, key, value)

    return [model.register_forward_pre_hook(refuse)] if holders else []


def _rates(module: nn.Module) -> Iterator[tuple[str, float]]:
    for key, value in vars(module).items():
        if _RATE.search(key) and _drops(key, value):
            yield key, value
    # Modules for stochastic depth, such as timm's, name their rate plainly.
    if re.search(r"DropPath|StochasticDepth", type(module).__name__):
        for key in ("drop_prob", "p"):
            if _drops(key, rate := vars(module).get(key)):
                yield key, float(rate or 0)


def _drops(key: str, value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value < 1 if _KEEPS.search(key) else value > 0


def _refused(where: str, key: str, value: float) -> UnsupportedError:
    off = 1 if _KEEPS.search(key) else 0
    return UnsupportedError(
        f"{where}={value:g} drops whole layers by random numbers that each rank would draw for itself, so ranks would "
        f"run different layers and wait for each other: set {key}={off:g} (dropout of single values is taken)"
    )


def _own_code(kind: type[nn.Module]) -> Iterator[CodeType]:
    """Yield the code of a class that is an architecture's own, without methods that only initialize weights."""
    for each in kind.__mro__:
        if not issubclass(each, nn.Module) or each is PreTrainedModel or each.__module__.startswith("torch."):
            continue
        for name, value in vars(each).items():
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if isinstance(code, CodeType) and name not in _FILLS:
                yield code
