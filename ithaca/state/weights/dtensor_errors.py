"""Plain error messages for operations that DTensor does not support on sharded weights.

DTensor has no rule for some operations (sorting, masked selection, a collective), and refuses plain tensors beside
DTensors. Its error speaks of placements. The two private methods that raise the error are wrapped: for meshes of sharded
weights the message says what works instead, other errors stay. Checked with torch 2.11 to 2.13; a torch without these
methods keeps its own messages.
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
    """Wrap torch's dispatcher, in this process, so that errors about sharded weights say what works instead."""
    dispatcher: Any = DTensor._op_dispatcher
    for name in _METHODS:
        if hasattr(dispatcher, name) and name not in dispatcher.__dict__:
            setattr(dispatcher, name, _Named(getattr(dispatcher, name)))


@dataclass(frozen=True)
class _Named:
    """Wrapper of one method of torch's dispatcher, whose first argument is the operation."""

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
