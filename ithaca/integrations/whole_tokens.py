"""Tensors of a shard's tokens put together again over the sequence group, `[B, L, ...] -> [B, S, ...]`.

Every rank of the group then holds the whole and computes the same from it. Backward takes each rank's own tokens: FSDP2
sums the parts of all ranks, so together they are the gradient of the whole, once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ithaca.mesh import Mesh
from ithaca.models.reduction_marks import ReductionMark, marks_below, set_reduced
from ithaca.sequence.layout import SequenceLayout


def whole_tokens(local_BL: Tensor, mesh: Mesh, layout: SequenceLayout) -> Tensor:
    """All tokens of the row, padding to the degree cut off. The gradient is averaged over the data axis, as DDP's is."""
    if local_BL.dtype == torch.bool:
        return whole_tokens(local_BL.to(torch.uint8), mesh, layout).bool()
    whole: Tensor = _Whole.apply(local_BL, mesh, layout, marks_below(local_BL))
    return whole


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_BL: Tensor, mesh: Mesh, layout: SequenceLayout, marks: list[ReductionMark]) -> Tensor:
        ctx.mesh, ctx.layout, ctx.marks = mesh, layout, marks
        parts = [torch.empty_like(local_BL, memory_format=torch.contiguous_format) for _ in range(mesh.shards)]
        dist.all_gather(parts, local_BL.detach().contiguous(), group=mesh.sequence.get_group())
        return torch.cat(parts, dim=1)[:, : layout.length]

    @staticmethod
    def backward(ctx: Any, grad_BS: Tensor) -> tuple[Tensor, None, None, None]:
        set_reduced(ctx.marks)
        missing = ctx.layout.padded - ctx.layout.length
        padded = F.pad(grad_BS, (0, 0) * (grad_BS.dim() - 2) + (0, missing))
        return padded[:, ctx.layout.shard(ctx.mesh.sequence_rank)] / ctx.mesh.dp, None, None, None
