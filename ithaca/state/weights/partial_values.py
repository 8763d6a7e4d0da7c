"""Refusal of one rank's own numbers: partial values that are read, and random numbers drawn on sharded weights.

A norm, a sum or a maximum of a sharded weight is of the rank's part until the ranks' parts are reduced. DTensor marks
such a value *partial*, but `.item()`, `float()` and `if` return the part (https://github.com/pytorch/pytorch/issues/144054).
A reduction there would be a collective behind a plain read, and hang where one rank alone logs. Random numbers are
drawn by each rank for its own part: with one seed on all ranks, the same numbers in every part.

DTensor looks up a handler of an operation in a private table first. The handlers registered here act on the meshes of
sharded weights and leave other DTensors alone. Checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ithaca.errors import UnsupportedError

_MESHES: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
_READ = torch.ops.aten._local_scalar_dense.default
# All operations of torch that draw a number for each element of a given tensor.
_DRAW = (
    *("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "geometric_", "cauchy_", "random_"),
    *("rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson", "binomial", "multinomial"),
    *("native_dropout", "rrelu_with_noise", "rrelu_with_noise_"),
)


def refuse_own_numbers(model: nn.Module) -> None:
    """Refuse reads of partial values and random draws on this model's weights and gradients, from now on."""
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    _MESHES.update(meshes)
    if meshes:
        register_handler([_READ], _read)
        register_handler(overloads(_DRAW), _draw)
        if DTensor.__format__ is not _format:
            DTensor.__format__ = _format  # type: ignore[assignment]


def overloads(names: Iterable[str]) -> list[Any]:
    """Return all overloads of torch's operations of these names."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def register_handler(operations: Iterable[Any], handler: Callable[..., Any]) -> None:
    """Register `handler(operation, args, kwargs)` for these operations on DTensors, in this process."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for operation in operations:
        handlers.setdefault(operation, handler)


def call_without_handler(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation without its handler, as torch does."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    # None while another thread is in this function.
    own = handlers.pop(operation, None)
    try:
        return operation(*args, **kwargs)
    finally:
        if own is not None:
            handlers[operation] = own


def draws(operation: Any) -> bool:
    """True if the operation draws random numbers for the elements of a given tensor."""
    return operation.overloadpacket.__name__ in _DRAW


def is_spread(value: object) -> bool:
    """True if the tensor is a weight that Ithaca sharded, its gradient, or computed from them."""
    return isinstance(value, DTensor) and is_spread_over(value.device_mesh)


def is_spread_over(mesh: object) -> bool:
    """True if weights were sharded over this mesh."""
    return isinstance(mesh, DeviceMesh) and mesh in _MESHES


def _read(_operation: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    value: DTensor = args[0]
    if is_spread(value) and not _is_whole(value):
        raise UnsupportedError(
            "a number was read off split weights or their gradients (.item(), float(...), if ...:), where a rank has that "
            "of its part alone: call .full_tensor() on it first, on every rank"
        )
    return value._local_tensor.item()


def _format(value: DTensor, how: str) -> str:
    """Format a DTensor of one number, as in `f"{norm:.4f}"`, which torch does for plain tensors alone."""
    number: Any = value.item() if is_spread(value) and value.dim() == 0 else value
    return number.__format__(how) if number is not value else Tensor.__format__(value, how)


def _draw(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(is_spread(value) for value in args):
        raise UnsupportedError(
            f"{operation.overloadpacket.__name__} was called on split weights, where each rank draws numbers of its own and "
            "not those of one process: draw them for the whole weight with one seed on every rank, and cut them with "
            "torch.distributed.tensor.distribute_tensor(numbers, weight.device_mesh, weight.placements)"
        )
    return call_without_handler(operation, args, kwargs)


def _is_whole(value: DTensor) -> bool:
    """True if every rank holds the reduced value."""
    sizes = zip(value.placements, value.device_mesh.shape, strict=True)
    return all(placement.is_replicate() or size == 1 for placement, size in sizes)
