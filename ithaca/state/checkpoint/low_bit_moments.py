"""An optimizer's moment as tensors that a checkpoint can hold and other degrees can read: torchao's 8-bit ones too.

torchao codes a shard of 4,096 numbers or more whose count is a multiple of the block (256): a byte for each number, a
scale for each block of the shard's numbers in a row. Codes are cut over ranks as the weight is. Scales can be cut
alike where a row of the weight is a number of blocks, or where all shards are equal; then blocks are the same at all
degrees of that kind. Elsewhere each shard is kept under a name of its own, and other degrees do not find theirs.

Invariant: what is given shares memory with the optimizer's state.
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

# torchao's own bound, below which a moment is kept whole.
_LEAST = 4096
BY_SHARD = "@"


def moment(key: str, value: Any, parameter: nn.Parameter, block: float) -> dict[str, Tensor]:
    """`value`, a part of the optimizer's state of `parameter`, under names that begin with `key`.

    `block`: how many numbers share a scale where the optimizer codes moments, else 0 or infinity.
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
    """Codes, and scales as rows where a row is a number of blocks, else all in one row."""
    columns, rest = divmod(shape[1:].numel(), local.block_size)
    scale = local.scale if rest or not columns else local.scale.view(-1, columns)
    return {f"{key}.codes": local.codes, f"{key}.scale": scale}


def shard_sizes(tensor: DTensor) -> list[int]:
    """How many numbers each shard has: rows are dealt out in equal pieces, the last ones shorter or empty."""
    ways = 1
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        ways *= size if placement.is_shard() else 1
    rows, row = tensor.shape[0], tensor.shape[1:].numel()
    piece = -(-rows // ways)
    return [max(0, min(piece, rows - piece * at)) * row for at in range(ways)]


def _shard(tensor: DTensor) -> int:
    """This rank's shard, counted over the axes that cut."""
    where: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    number = 0
    for at, placement, size in zip(where, tensor.placements, tensor.device_mesh.shape, strict=True):
        number = number * size + at if placement.is_shard() else number
    return number


def _cut_as(like: DTensor, local: Tensor, shape: torch.Size) -> DTensor:
    """`local` as this rank's part of a whole of `shape`, cut over the ranks as `like` is, in the memory it has.

    Not `DTensor.from_local`, which would move what is kept on the host to the mesh's device.
    """
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)
