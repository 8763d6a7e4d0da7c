"""`compute_in_fp64`: a context in which a model in fp64 really computes in fp64. For `ithaca verify` and tests only.

transformers casts norms, RoPE, routers, eager softmax and the loss to fp32 whatever the model's dtype, which hides
errors below 1e-7. Inside `compute_in_fp64()` every cast to fp32 becomes a cast to fp64, so two correct ways to compute the same
number agree to about 1e-14, and a fault stands out.
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


def _with_fp64_for_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(a is torch.float32 for a in args) or kwargs.get("dtype") is torch.float32:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(*args, **kwargs)

    return call


@contextmanager
def compute_in_fp64() -> Iterator[None]:
    """Turn casts to fp32 into casts to fp64 inside the context, in the whole process."""
    # The first device context of a process lists torch's factory functions, for good: enter one before they are replaced.
    with torch.device("meta"):
        torch.empty(0)
    # A TorchFunctionMode would replace no attributes, but it is off while backward runs: layers that are recomputed in
    # backward would round to fp32 again.
    with ExitStack() as stack:
        stack.enter_context(patch.object(Tensor, "float", Tensor.double))
        for owner, names in ((Tensor, _METHODS), (torch, _FUNCTIONS)):
            for name in names:
                stack.enter_context(patch.object(owner, name, _with_fp64_for_fp32(getattr(owner, name))))
        yield


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Return the largest difference, relative to the largest reference entry and to 1 at least."""
    if reference.numel() == 0:
        return 0.0
    difference = (value.detach().double() - reference.detach().double()).abs().max()
    scale = reference.detach().double().abs().max().clamp(min=1.0)
    return float("inf") if not torch.isfinite(difference) else float(difference / scale)
