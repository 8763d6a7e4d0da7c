"""Broadcast of differing weights: every rank starts from rank 0's.

Ranks that build their model without a common seed would cut their shards from different models. `make_equal` compares
fingerprints of all parameters and buffers, a few numbers of each row, in one small reduction, and sends only tensors
that differ. Tensors on the meta device hold no numbers yet and are left to `load_weights`.
"""

from __future__ import annotations

import hashlib
import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.errors import UnsupportedError
from ithaca.mesh import Mesh

# Numbers compared of each row: one cache line. Every row, because new tokens' embeddings are rows of their own.
_SAMPLE = 8

logger = logging.getLogger("ithaca")


def make_equal(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast rank 0's parameters and buffers where ranks differ, and log a warning; called on all ranks."""
    if mesh.world == 1:
        return
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    structure = repr([(key, tuple(x.shape), x.dtype, x.requires_grad, x.is_meta) for key, x in named.items()])
    if differing_of([digest(structure.encode())], mesh):
        raise UnsupportedError(
            "the ranks' models differ in their weights' names, shapes, dtypes, requires_grad or being on the meta device: "
            "build the same model on every rank, and freeze the same weights"
        )
    held = {key: x.detach() for key, x in named.items() if x.numel() and not x.is_meta}
    differing = differing_of([fingerprint(x) for x in held.values()], mesh)
    if not differing:
        return
    keys = list(held)
    if mesh.rank == 0:
        others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        logger.warning(
            "ranks held different weights (%s%s): rank 0's were taken on all; seed all ranks alike before building the "
            "model to save the copying",
            keys[differing[0]],
            others,
        )
    for index in differing:
        _broadcast(held[keys[index]], mesh)


def differing_of(numbers: list[int], mesh: Mesh) -> list[int]:
    """Return the indices at which the ranks' numbers are not all equal."""
    own = torch.tensor(numbers, dtype=torch.int64, device=mesh.device)
    most = torch.stack([own, -own])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.world_group)
    return (most[0] != -most[1]).nonzero().flatten().tolist()


def fingerprint(tensor: Tensor) -> int:
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)[:, :_SAMPLE]
    return digest(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes())


def digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")


def _broadcast(tensor: Tensor, mesh: Mesh) -> None:
    """Send rank 0's tensor to all ranks, as bytes, which every backend sends, through the device."""
    sent = tensor.to(mesh.device).reshape(-1).view(torch.uint8)
    dist.broadcast(sent, src=0, group=mesh.world_group)
    tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))
