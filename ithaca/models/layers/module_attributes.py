"""What modules are besides their weights: types, scalars and functions, by which layers of one shape may yet differ.

Findings and compiled code are shared by layers whose settings are equal, and hold while the settings stay: what is
noted of them when a model is parallelized is a flat list that every pass compares.
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
# A module, the name of one of its settings, and the value.
Setting = tuple[nn.Module, str, Any]


def settings(module: nn.Module, *, places: bool = True) -> tuple[Any, ...]:
    """Those of a module and of the modules in it. `places`: also the number of the layer, where one has it."""
    found = []
    for name, inner in module.named_modules():
        own = {key: _known_by(inner, value) for key, value in _own(inner) if places or not _is_place(key, value)}
        found.append((name, type(inner), *sorted(own.items(), key=lambda item: item[0])))
    return tuple(found)


@dataclass(eq=False, slots=True)
class Assumed:
    """What was found or compiled by, of one model."""

    quiet: list[nn.Module] = field(default_factory=list)
    values: list[Setting] = field(default_factory=list)

    def drawless(self, children: list[nn.Module]) -> None:
        """Nothing was drawn in them, so they are run again without the numbers they drew."""
        self.quiet += children
        within = [(inner, key, p) for child in children for inner in child.modules() for key, p in _own(inner)]
        # Probabilities may be numbers, where no module drops.
        self.values += [each for each in within if "drop" in each[1] and isinstance(each[2], int | float)]

    def compiled(self, children: list[nn.Module]) -> None:
        """Compiled code has their settings as they are just now."""
        for child in children:
            # A child's own forward is what calls the code.
            self.values += [(inner, "forward", None) for inner in child.modules() if inner is not child]
            within = [(inner, key, value) for inner in child.modules() for key, value in _own(inner)]
            self.values += [each for each in within if each[1] != "forward"]

    def changed(self, model: nn.Module) -> str | None:
        """What is no longer as it was, in words."""
        for child in self.quiet:
            if (dropout := dropping(child)) is not None:
                return f"a dropout of {dropout.p} was set at {_name(model, dropout)}"
        for module, key, before in self.values:
            now = module.__dict__.get(key)
            if now is before or now == before:
                continue
            if key == "forward":
                return f"{_name(model, module)} was given a forward"
            return f"{_name(model, module)}.{key} was changed from {before} to {now}"
        return None


def dropping(module: nn.Module) -> nn.Module | None:
    """The first dropout in it, if any, that drops something."""
    # Asked of every unit in every pass: a plain loop, for modules() takes three times as long.
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return module
    for child in module._modules.values():
        if child is not None and (found := dropping(child)) is not None:
            return found
    return None


def _name(model: nn.Module, module: nn.Module) -> str:
    return next((name for name, each in model.named_modules() if each is module), type(module).__name__)


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if key.startswith("_") or key == "training":
            continue
        if isinstance(value, (*_PLAIN, tuple)) or (callable(value) and not isinstance(value, nn.Module)):
            yield key, value


def _is_place(key: str, value: Any) -> bool:
    return type(value) is int and ("idx" in key or "layer" in key)


def _known_by(module: nn.Module, value: Any) -> Any:
    """What is equal where two modules have equal settings."""
    if isinstance(value, partial):
        named = tuple((key, _known_by(module, value.keywords[key])) for key in sorted(value.keywords))
        return (partial, _known_by(module, value.func), _known_by(module, value.args), named)
    if isinstance(value, MethodType) and value.__self__ is module:
        return value.__func__
    if isinstance(value, tuple):
        return tuple(_known_by(module, each) for each in value)
    return value if isinstance(value, Hashable) else type(value)
