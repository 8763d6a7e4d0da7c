"""Code of the user's own in a model: forwards that no survey of transformers' architectures has measured.

Classes and functions of the libraries in `_KNOWN` are what was measured, or keep to its contract. Anything else in a
model, a module that was put into it or a forward that was put on one of its modules, is looked at again; so are torch's
modules that may read several tokens, which few architectures have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

_OF_SEVERAL = (
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
    """The path and class of the first module to be looked at, None where there is none."""
    for name, module in model.named_modules():
        given = module.__dict__.get("forward")
        own = is_foreign(type(module).forward) or (given is not None and is_foreign(given))
        if own or isinstance(module, _OF_SEVERAL):
            return f"{name or 'the model'} ({type(module).__name__})"
    return None


def is_foreign(function: Callable[..., Any]) -> bool:
    """True if code from outside the known libraries runs in a call of `function`, or of what it wraps."""
    return any(home.partition(".")[0] not in _KNOWN for home in _homes(function))


def _homes(function: Any) -> Iterator[str]:
    """The modules whose code runs: `__module__` is no witness, since functools.wraps copies it."""
    while function is not None:
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        names: Any = getattr(function, "__globals__", None)
        yield names["__name__"] if names is not None else type(function).__module__
        function = getattr(function, "__wrapped__", None)
