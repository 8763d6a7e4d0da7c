"""Sharding of embeddings that need a gradient: forward takes a shard, backward all-gathers the shards' gradients.

Soft prompts, a projector in front of the model and noise on embeddings are computed on every rank of a sequence group,
for the whole row. The gradient of a plain slice would be zero at all other ranks' tokens. With the all-gather the
parameters behind the embeddings have on every rank the gradient that one process has for these rows.

Invariant: padding to a multiple of the shard count has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.mesh import Mesh
from ithaca.sequence.layout import SequenceLayout


def cut_embeddings(whole_BSC: Tensor, cut: Callable[[Tensor], Tensor], layout: SequenceLayout, mesh: Mesh) -> Tensor:
    """Return this rank's shard, `cut(whole)`; its backward is a collective of the sequence group."""
    shard: Tensor = _CutEmbeddings.apply(whole_BSC, cut, layout, mesh)
    return shard


class _CutEmbeddings(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole_BSC: Tensor, cut: Callable[[Tensor], Tensor], layout: SequenceLayout, mesh: Mesh
    ) -> Tensor:
        ctx.layout, ctx.mesh, ctx.device = layout, mesh, whole_BSC.device
        # A copy even if the shard is the whole row: a model may scale its embeddings in place.
        shard = cut(whole_BSC.detach())
        return shard.clone() if shard.data_ptr() == whole_BSC.data_ptr() else shard

    @staticmethod
    def backward(ctx: Any, grad_BLC: Tensor) -> tuple[Tensor, None, None, None]:
        parts = [torch.empty_like(grad_BLC, memory_format=torch.contiguous_format) for _ in range(ctx.mesh.shards)]
        dist.all_gather(parts, grad_BLC.contiguous(), group=ctx.mesh.sequence.get_group())
        return torch.cat(parts, dim=1)[:, : ctx.layout.length].to(ctx.device), None, None, None
