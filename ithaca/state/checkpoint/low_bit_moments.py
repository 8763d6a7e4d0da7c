"""Optimizer moments as tensors for a checkpoint that other numbers of ranks can read, torchao's 8-bit ones too.

torchao quantizes a shard of 4,096 numbers or more whose count is a multiple of the block (256): a byte for each number
and a scale for each block of consecutive numbers. Codes are sharded like the weight. Scales can be sharded like the
weight if a row is a whole number of blocks, or if all shards are equal. Elsewhere each shard is saved under a name of
its own, which only the same number of ranks can read.

Invariant: the returned tensors share memory with the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ithaca.errors import CheckpointError

# torchao's own bound, below which a moment is not quantized.
_LEAST = 4096
BY_SHARD = "@"


def moment(key: str, value: Any, parameter: nn.Parameter, block: float) -> dict[str, Tensor]:
    """Return `value`, an entry of the optimizer's state of `parameter`, under names that begin with `key`.

    `block`: the numbers that share a scale if the optimizer quantizes moments, else 0 or infinity.
    """
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{key} is a {type(value).__name__}: only tensors can be kept exactly")
    if value.ndim == 0 or block in (0, inf):
        return {key: value}
    if not isinstance(value, DTensor):
        return _coded(key, value, parameter.shape) if hasattr(value, "codes") else {key: value}
    sizes = shard_sizes(value)
    coded = [size >= _LEAST and size % block == 0 for size in sizes]
    local: Any = value.to_local()
    if not any(coded):
        return {key: value}
    if not all(coded) or (value.shape[1:].numel() % block and len(set(sizes)) > 1):
        name = f"{key}{BY_SHARD}{_shard(value)}of{len(sizes)}"
        return _coded(name, local, local.shape) if hasattr(local, "codes") else {name: local}
    whole = _coded(key, local, value.shape)
    codes, scale = whole[f"{key}.codes"], whole[f"{key}.scale"]
    rows = (value.shape[0], *scale.shape[1:]) if scale.ndim > 1 else (value.numel() // int(block),)
    return {f"{key}.codes": _cut_as(value, codes, value.shape), f"{key}.scale": _cut_as(value, scale, torch.Size(rows))}


def _coded(key: str, local: Any, shape: torch.Size) -> dict[str, Tensor]:
    """Return codes and scales; the scales in rows if a row is a whole number of blocks, else flat."""
    # codes, scale and block_size are private attributes of torchao's moments (torchao 0.16 and newer).
    columns, rest = divmod(shape[1:].numel(), local.block_size)
    scale = local.scale if rest or not columns else local.scale.view(-1, columns)
    return {f"{key}.codes": local.codes, f"{key}.scale": scale}


def shard_sizes(tensor: DTensor) -> list[int]:
    """Return the number of elements of each shard: FSDP2 splits rows into equal pieces, the last ones shorter or empty."""
    ways = 1
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        ways *= size if placement.is_shard() else 1
    rows, row = tensor.shape[0], tensor.shape[1:].numel()
    piece = -(-rows // ways)
    return [max(0, min(piece, rows - piece * at)) * row for at in range(ways)]


def _shard(tensor: DTensor) -> int:
    """Return the number of this rank's shard, counted over the sharded mesh axes."""
    where: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    number = 0
    for at, placement, size in zip(where, tensor.placements, tensor.device_mesh.shape, strict=True):
        number = number * size + at if placement.is_shard() else number
    return number


def _cut_as(like: DTensor, local: Tensor, shape: torch.Size) -> DTensor:
    """Return `local` as this rank's part of a DTensor of `shape`, sharded like `like`, without a copy."""
    # Not DTensor.from_local, which would move tensors on the host to the mesh's device. The constructor and DTensorSpec
    # are private, checked with torch 2.11 to 2.13.
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)
