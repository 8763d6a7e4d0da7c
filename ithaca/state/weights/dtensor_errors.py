"""Operations that torch cannot do with a weight that is split over ranks: its words about DTensors become one sentence.

DTensor has no rule for some operations (sorting, selecting by a mask, a collective), and takes no plain tensor beside a
split one. Nothing wrong comes of it, but the error speaks of placements. The two methods of torch that raise it are asked
through ours, which speak for the meshes that weights were spread over and leave other errors as they are. Seen in torch
2.11 to 2.13; a torch that has no such methods keeps its own words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from ithaca.errors import IthacaError, UnsupportedError
from ithaca.state.weights.partial_values import is_spread_over

_METHODS = ("_propagate_op_sharding_dispatch_slow_path", "_try_replicate_spec_for_scalar_tensor")


def name_unknown_operations() -> None:
    """From now on let errors about operations on spread weights say what works instead."""
    dispatcher: Any = DTensor._op_dispatcher
    for name in _METHODS:
        if hasattr(dispatcher, name) and name not in dispatcher.__dict__:
            setattr(dispatcher, name, _Named(getattr(dispatcher, name)))


@dataclass(frozen=True)
class _Named:
    """In place of one method of torch's dispatcher; an operation is its first argument."""

    original: Callable[..., Any]

    def __call__(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.original(operation, *args, **kwargs)
        except RuntimeError as error:
            meshes = (getattr(value, "compute_mesh", value) for value in (*args, *kwargs.values()))
            if isinstance(error, IthacaError) or not any(is_spread_over(mesh) for mesh in meshes):
                raise
            raise UnsupportedError(
                f"torch cannot do {getattr(operation, '__name__', operation)} with a weight that is split over ranks (a "
                "DTensor), or with one beside a plain tensor: take the whole weight with weight.full_tensor() on every "
                "rank; change weights with operations of whole tensors (mul_, add_, copy_, zero_) or of rows "
                "(weight[:50].zero_()); and cut a mask or other values as the weight is, with torch.distributed.tensor."
                "distribute_tensor(values, weight.device_mesh, weight.placements)"
            ) from error
