"""Trials of a layer's units, one for each kind of layer, before the model is changed.

`roles.py` finds candidates without looking at numbers. A trial installs one unit alone on its layer, in tiles of two
tokens, and compares every gradient with the untouched layer's: those of the inputs and of all parameters, frozen or not.
Each trial runs twice, on the model's own hidden states and on random ones, with the same random seed in both layers.

    gradients differ by more than rounding          the unit is dropped
    a zeroed output changes no bit of a gradient    the unit is silent: a replay skips its output
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
from ithaca.models.discover.dependence import rounding_tolerance
from ithaca.models.discover.passing import has_side_outputs
from ithaca.models.discover.roles import (
    UnitRole,
    find_units,
    gradients,
    layer_arguments,
    signature,
    training_mode,
    with_random_hidden,
)
from ithaca.models.layers.hooks import without_hooks


class TrialRunner(Protocol):
    """Runs a layer with a unit installed; with `value=False` a silent unit returns zeros instead of its output."""

    value: bool


# A context manager that installs one unit on a layer.
OnTrial = Callable[[nn.Module, UnitRole], AbstractContextManager[TrialRunner]]


def roles_of(
    model: PreTrainedModel, layers: list[nn.Module], on_trial: OnTrial, *, find_silent: bool = True
) -> list[list[UnitRole]]:
    """Return the units of each layer that pass their trial; `find_silent`: also find those that are silent in a replay."""
    found: dict[tuple[Any, ...], list[UnitRole]] = {}
    # Before the runs: a module that counts its runs in an attribute changes its signature by running.
    kinds = [signature(layer) for layer in layers]
    # Layers of one kind share a result, so a hook on one of them must not change the result.
    with without_hooks(module for layer in layers for module in layer.modules()):
        for index, (args, kwargs) in layer_arguments(model, layers).items():
            layer = layers[index]
            tried = (
                _tried(layer, role, on_trial, args, kwargs, find_silent) for role in find_units(layer, args, kwargs)
            )
            found[kinds[index]] = [role for role in tried if role is not None]
    return [found[kind] for kind in kinds]


def _tried(
    layer: nn.Module, role: UnitRole, on_trial: OnTrial, args: Any, kwargs: Any, find_silent: bool
) -> UnitRole | None:
    """Return the unit, marked silent if its trial shows so; None if the unit changes a gradient of the layer."""
    inputs = [(args, kwargs), with_random_hidden(args, kwargs, seed=1)]
    with training_mode(layer, training=False) if role.draws else nullcontext():
        # Half precision rounds by percents, so no comparison of gradients: the NaN tests of `dependence.py` decide.
        precise = all(p.dtype in (torch.float32, torch.float64) for p in layer.parameters() if p.is_floating_point())
        if precise and not all(_unchanged(layer, role, on_trial, *each) for each in inputs):
            return None
    if not find_silent or not role.wide or role.draws or has_side_outputs(layer, args, kwargs):
        return role
    silent = replace(role, silent=True)
    return silent if all(_is_silent(layer, silent, on_trial, *each) for each in inputs) else role


def _unchanged(layer: nn.Module, role: UnitRole, on_trial: OnTrial, args: Any, kwargs: Any) -> bool:
    """True if the gradients of the layer are the same with the unit in tiles as without, to rounding."""
    dout, rng = _random_output_gradient(layer, args, kwargs), Rng(next(layer.parameters()).device)
    with rng.again():
        plain = gradients(layer, args, kwargs, dout)
    with rng.again(), on_trial(layer, role):
        tiled = gradients(layer, args, kwargs, dout)
    # Relative to the largest gradient: a gradient that is zero but for rounding, such as that of a key bias, has
    # rounding errors of the size of the others'.
    tolerance = rounding_tolerance(layer, dout) * max(float(x.norm()) for x in plain)
    return all(a.shape == b.shape and float((a - b).norm()) <= tolerance for a, b in zip(plain, tiled, strict=True))


def _is_silent(layer: nn.Module, role: UnitRole, on_trial: OnTrial, args: Any, kwargs: Any) -> bool:
    """True if zeroing the unit's output leaves every gradient unchanged, bit by bit."""
    dout, rng = _random_output_gradient(layer, args, kwargs), Rng(next(layer.parameters()).device)
    with on_trial(layer, role) as runner:
        with rng.again():
            with_value = gradients(layer, args, kwargs, dout)
        runner.value = False
        with rng.again():
            without = gradients(layer, args, kwargs, dout)
    return all(torch.equal(a, b) for a, b in zip(with_value, without, strict=True))


def _random_output_gradient(layer: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """Return a random gradient of the layer's first output."""
    with torch.no_grad(), Rng(next(layer.parameters()).device).again():
        output = layer(*args, **kwargs)
    first = output[0] if isinstance(output, tuple) else output
    return torch.randn(first.shape, generator=torch.Generator().manual_seed(0)).to(first)
