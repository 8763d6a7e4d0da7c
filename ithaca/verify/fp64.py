"""A mode in which a model in fp64 really computes in fp64. For proofs only.

transformers casts norms, RoPE, routers, eager softmax and the loss to fp32 whatever the model's dtype, which hides
errors below 1e-7. Inside `promoted()` every cast to fp32 becomes one to fp64, so two ways of computing the same
thing agree to about 1e-14 and a real fault stands out.

torch's own `TorchFunctionMode` would be the tidy tool, but it is off while backward runs, and layers that are
recomputed in backward would round again. So for the time of the context the functions themselves are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_METHODS = ("to", "type", "softmax", "log_softmax", "sum", "mean")
_FUNCTIONS = ("softmax", "log_softmax", "sum", "mean", "zeros", "ones", "full", "arange", "tensor", "empty")


def _doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with fp64 wherever fp32 is asked for."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(a is torch.float32 for a in args) or kwargs.get("dtype") is torch.float32:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(*args, **kwargs)

    return call


@contextmanager
def promoted() -> Iterator[None]:
    """Casts to fp32 go to fp64 instead, in the whole process, for the time being."""
    with torch.device("meta"):
        # The first such context of a process notes which functions make tensors, for good: not those below.
        torch.empty(0)
    with ExitStack() as stack:
        stack.enter_context(patch.object(Tensor, "float", Tensor.double))
        for owner, names in ((Tensor, _METHODS), (torch, _FUNCTIONS)):
            for name in names:
                stack.enter_context(patch.object(owner, name, _doubled(getattr(owner, name))))
        yield


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The largest difference, against the largest reference entry where that exceeds 1."""
    if reference.numel() == 0:
        return 0.0
    difference = (value.detach().double() - reference.detach().double()).abs().max()
    scale = reference.detach().double().abs().max().clamp(min=1.0)
    return float("inf") if not torch.isfinite(difference) else float(difference / scale)
