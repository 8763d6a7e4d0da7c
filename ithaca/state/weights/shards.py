"""Bounds of a rank's shard within the whole weight."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def bounds(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole weight that this rank holds; the whole weight's if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    # Private, checked with torch 2.11 to 2.13; the same function cuts shards in torch's own checkpointing.
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))
