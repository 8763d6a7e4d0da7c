"""A mode in which a model in fp64 really computes in fp64. For proofs only.

transformers casts norms, RoPE, routers, eager softmax and the loss to fp32 whatever the model's dtype, which hides
errors below 1e-7. Inside `promoted()` every cast to fp32 becomes one to fp64, so two ways of computing the same
thing agree to about 1e-14 and a real fault stands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CASTS = {torch.Tensor.to, torch.Tensor.type}
_WITH_DTYPE = {
    torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax,
    torch.log_softmax, torch.Tensor.log_softmax, torch.nn.functional.log_softmax,
    torch.Tensor.sum, torch.sum, torch.Tensor.mean, torch.mean,
    torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.empty,
}  # fmt: skip


class _Promote(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func in _CASTS:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if (func in _CASTS or func in _WITH_DTYPE) and kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


@contextmanager
def promoted() -> Iterator[None]:
    """Casts to fp32 go to fp64 instead, for the time being and in this thread."""
    with _Promote():
        yield


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The largest difference, against the largest reference entry where that exceeds 1."""
    if reference.numel() == 0:
        return 0.0
    difference = (value.detach().double() - reference.detach().double()).abs().max()
    scale = reference.detach().double().abs().max().clamp(min=1.0)
    return float("inf") if not torch.isfinite(difference) else float(difference / scale)
