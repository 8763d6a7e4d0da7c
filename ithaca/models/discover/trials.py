"""Trials of a layer's units, once for each kind of layer, before anything is put on the model.

What a unit may be is found without numbers (`roles.py`, `dependence.py`). Here each is put on its layer alone, in tiles
of two tokens, and every gradient is held against the untouched layer's: of the inputs and of all parameters, frozen or
not, once for the hidden states that the model makes and once for random ones. A unit that changes more than rounding
does is left out; other parts of the layer that draw random numbers draw the same ones each time. A unit is silent if a
replay may leave its value out: with zeros in its place no gradient changes by a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ithaca.memory.random_state import Rng
from ithaca.models.discover.dependence import rounding
from ithaca.models.discover.passing import hands_on
from ithaca.models.discover.roles import UnitRole, drawn, find_units, gradients, layer_arguments, signature, switched
from ithaca.models.layers.hooks import without_hooks


class TrialRunner(Protocol):
    """Runs a layer with a unit on it; with `value=False` the value of a silent unit is left out."""

    value: bool


# Puts one unit on a layer, for the time of a `with`.
OnTrial = Callable[[nn.Module, UnitRole], AbstractContextManager[TrialRunner]]


def roles_of(
    model: PreTrainedModel, layers: list[nn.Module], on_trial: OnTrial, *, silence: bool = True
) -> list[list[UnitRole]]:
    """The units of each layer, tried once a kind; with `silence` also which of them may stay silent in a replay."""
    found: dict[tuple[Any, ...], list[UnitRole]] = {}
    # Ahead of the runs: there may be modules that count theirs.
    kinds = [signature(layer) for layer in layers]
    # What layers of one kind share is not to be judged by a hook that one of them has.
    with without_hooks(module for layer in layers for module in layer.modules()):
        for index, (args, kwargs) in layer_arguments(model, layers).items():
            layer = layers[index]
            tried = (_tried(layer, role, on_trial, args, kwargs, silence) for role in find_units(layer, args, kwargs))
            found[kinds[index]] = [role for role in tried if role is not None]
    return [found[kind] for kind in kinds]


def _tried(
    layer: nn.Module, role: UnitRole, on_trial: OnTrial, args: Any, kwargs: Any, silence: bool
) -> UnitRole | None:
    """The unit if every gradient of the layer is with it what it is without, to rounding; silent if zeroing its value
    changes none of them by a bit; None if it changes what the layer computes."""
    inputs = [(args, kwargs), drawn(args, kwargs, seed=1)]
    with switched(layer, training=False) if role.draws else nullcontext():
        # Half precision rounds by percents: there nothing but dependence is known, which was found without numbers.
        if _fine(layer) and not all(_unchanged(layer, role, on_trial, *each) for each in inputs):
            return None
    if not silence or not role.wide or role.draws or hands_on(layer, args, kwargs):
        return role
    silent = replace(role, silent=True)
    return silent if all(_silent(layer, silent, on_trial, *each) for each in inputs) else role


def _fine(layer: nn.Module) -> bool:
    return all(p.dtype in (torch.float32, torch.float64) for p in layer.parameters() if p.is_floating_point())


def _unchanged(layer: nn.Module, role: UnitRole, on_trial: OnTrial, args: Any, kwargs: Any) -> bool:
    """Whether outputs and gradients of the layer are the same with the unit in tiles as without."""
    weigh, rng = _weights_for(layer, args, kwargs), Rng(next(layer.parameters()).device)
    with rng.again():
        plain = gradients(layer, args, kwargs, weigh)
    with rng.again(), on_trial(layer, role):
        tiled = gradients(layer, args, kwargs, weigh)
    # Where nothing but rounding is left of a gradient, as of a bias of keys, it has the size of the others' rounding.
    room = rounding(layer, weigh) * max(float(x.norm()) for x in plain)
    return all(a.shape == b.shape and float((a - b).norm()) <= room for a, b in zip(plain, tiled, strict=True))


def _silent(layer: nn.Module, role: UnitRole, on_trial: OnTrial, args: Any, kwargs: Any) -> bool:
    """Whether zeroing the unit's value leaves every gradient as it is, bit by bit."""
    weigh, rng = _weights_for(layer, args, kwargs), Rng(next(layer.parameters()).device)
    with on_trial(layer, role) as runner:
        with rng.again():
            with_value = gradients(layer, args, kwargs, weigh)
        runner.value = False
        with rng.again():
            without = gradients(layer, args, kwargs, weigh)
    return all(torch.equal(a, b) for a, b in zip(with_value, without, strict=True))


def _weights_for(layer: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """A random gradient of the layer's output."""
    with torch.no_grad(), Rng(next(layer.parameters()).device).again():
        output = layer(*args, **kwargs)
    first = output[0] if isinstance(output, tuple) else output
    return torch.randn(first.shape, generator=torch.Generator().manual_seed(0)).to(first)
