"""Settings of modules: attributes beside their weights (types, scalars, functions) that steer their forward.

    settings(mlp)   (("", LlamaMLP, ("act_fn", ...), ("hidden_size", 64)), ("gate_proj", Linear, ("in_features", 64), ...))

Layers of equal shapes and settings share findings and compiled code, which hold while the settings stay the same.
`Assumed` records the settings when a model is parallelized, as a flat list that every pass compares.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# A module, the name of one of its settings, and the setting's value.
Setting = tuple[nn.Module, str, Any]


def settings(module: nn.Module, *, with_layer_index: bool = True) -> tuple[Any, ...]:
    """Return the settings of a module and of its inner modules; equal tuples mean equal settings."""
    found = []
    for name, inner in module.named_modules():
        own = {
            key: _comparable(inner, value)
            for key, value in _own_settings(inner)
            if with_layer_index or not (type(value) is int and ("idx" in key or "layer" in key))
        }
        found.append((name, type(inner), *sorted(own.items(), key=lambda item: item[0])))
    return tuple(found)


@dataclass(eq=False, slots=True)
class Assumed:
    """Settings of one model on which its findings and its compiled code depend.

    `deterministic`: modules that draw no random numbers. `recorded`: settings with their values at that time.
    """

    deterministic: list[nn.Module] = field(default_factory=list)
    recorded: list[Setting] = field(default_factory=list)

    def assume_deterministic(self, children: list[nn.Module]) -> None:
        """Record that the children draw no random numbers: replays run them without restoring the random state."""
        self.deterministic += children
        within = [(inner, key, p) for child in children for inner in child.modules() for key, p in _own_settings(inner)]
        # A module may keep a dropout probability as a number and call F.dropout.
        self.recorded += [each for each in within if "drop" in each[1] and isinstance(each[2], int | float)]

    def assume_forwards(self, children: list[nn.Module]) -> None:
        """Record the forwards inside the children of a unit, which would see tiles and not all tokens."""
        # The forwards of the children themselves are ours; a child that gets another one runs by itself on all tokens.
        within = [inner for child in children for inner in child.modules() if inner is not child]
        self.recorded += [(inner, "forward", inner.__dict__.get("forward")) for inner in within]

    def assume_compiled(self, children: list[nn.Module]) -> None:
        """Record the children's settings, which compiled code holds as constants."""
        for child in children:
            # The forward of the child itself is ours: that forward calls the compiled code.
            self.recorded += [(inner, "forward", None) for inner in child.modules() if inner is not child]
            within = [(inner, key, value) for inner in child.modules() for key, value in _own_settings(inner)]
            self.recorded += [each for each in within if each[1] != "forward"]

    def changed(self, model: nn.Module) -> str | None:
        """Return a phrase that names the first changed setting; None if there is none."""
        for child in self.deterministic:
            if (dropout := dropping(child)) is not None:
                return f"a dropout of {dropout.p} was set at {_name(model, dropout)}"
        for module, key, before in self.recorded:
            now = module.__dict__.get(key)
            if now is before or now == before:
                continue
            if key == "forward":
                return f"{_name(model, module)} was given a forward"
            return f"{_name(model, module)}.{key} was changed from {before} to {now}"
        return None


def dropping(module: nn.Module) -> nn.Module | None:
    """Return the first dropout inside with a probability above 0; None if there is none."""
    # A plain loop, as every unit of every pass calls this: modules() takes three times as long.
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return module
    for child in module._modules.values():
        if child is not None and (found := dropping(child)) is not None:
            return found
    return None


def _name(model: nn.Module, module: nn.Module) -> str:
    return next((name for name, each in model.named_modules() if each is module), type(module).__name__)


def _own_settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if key.startswith("_") or key == "training":
            continue
        if isinstance(value, (*_PLAIN, tuple)) or (callable(value) and not isinstance(value, nn.Module)):
            yield key, value


def _comparable(module: nn.Module, value: Any) -> Any:
    """Return a value that is equal for two modules with equal settings: functions of a module without the module."""
    if isinstance(value, partial):
        named = tuple((key, _comparable(module, value.keywords[key])) for key in sorted(value.keywords))
        return (partial, _comparable(module, value.func), _comparable(module, value.args), named)
    if isinstance(value, MethodType) and value.__self__ is module:
        return value.__func__
    if isinstance(value, tuple):
        return tuple(_comparable(module, each) for each in value)
    return value if isinstance(value, Hashable) else type(value)
