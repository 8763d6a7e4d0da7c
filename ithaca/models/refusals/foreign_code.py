"""Detection of the user's own code in a model, which the survey of transformers' architectures has not measured.

Classes and functions of the libraries in `_KNOWN` were measured, or keep their contract. A model with any other module or
forward is examined again at `parallelize`; so is one with torch's modules that may mix tokens, which few architectures have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

_MIXING_TOKENS = (
    nn.modules.batchnorm._NormBase,
    nn.modules.conv._ConvNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._MaxPoolNd,
    nn.GroupNorm,
    nn.RNNBase,
    nn.MultiheadAttention,
)
_KNOWN = {"transformers", "torch", "ithaca", "trl", "peft", "accelerate", "liger_kernel"}


def foreign_within(model: nn.Module) -> str | None:
    """Return path and class of the first module to examine; None if there is none."""
    for name, module in model.named_modules():
        given = module.__dict__.get("forward")
        own = is_foreign(type(module).forward) or (given is not None and is_foreign(given))
        if own or isinstance(module, _MIXING_TOKENS):
            return f"{name or 'the model'} ({type(module).__name__})"
    return None


def is_foreign(function: Callable[..., Any]) -> bool:
    """True if a call of `function`, or of a function that it wraps, runs code from outside the known libraries."""
    return any(home.partition(".")[0] not in _KNOWN for home in _homes(function))


def _homes(function: Any) -> Iterator[str]:
    """Yield the names of modules whose code runs in a call."""
    while function is not None:
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        # Not `__module__`, which functools.wraps copies.
        names: Any = getattr(function, "__globals__", None)
        yield names["__name__"] if names is not None else type(function).__module__
        function = getattr(function, "__wrapped__", None)
