"""Ulysses attention: exchange, attend with the local heads over the whole sequence, exchange back.

In: shards `q_BLHD, k_BLKD, v_BLKE`, tokens in layout order. Out: `out_BLHE`. Two collectives forward (q, k, v
together; the output) and two backward (the output's gradient; dq, dk, dv together). All that backward needs
lives on the autograd context, since CUDA runs backward on another thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.arguments import named_arguments
from ithaca.attention.anchored import GroupPlan, Tape, grouped_attention
from ithaca.attention.exchange import Lane, to_heads, to_tokens
from ithaca.attention.heads import HeadSplit, split_heads
from ithaca.attention.kernels import check_name
from ithaca.attention.kernels.interface import AttentionSpec
from ithaca.attention.local import LocalAttention
from ithaca.errors import BatchError, MeshError, UnsupportedError
from ithaca.mesh import Mesh, check_mesh, largest_divisor
from ithaca.sequence.layout import SequenceLayout


@named_arguments
def ulysses_attention(
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKE: Tensor,
    mesh: Mesh,
    layout: SequenceLayout,
    causal: bool = True,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Exact attention over the whole sequence, each rank holding a shard of tokens; gives `[B, L, H, E]`.

    `window`: a query sees keys less than `window` tokens away. `sinks_H`: one extra score a head. The
    gradient of `sinks_H` is this rank's part: sum it over ranks like any weight's.
    """
    check_mesh(mesh)
    spec = AttentionSpec(
        scale=q_BLHD.shape[-1] ** -0.5 if scale is None else float(scale), causal=causal, window=window, softcap=softcap
    )
    return attend_sharded(q_BLHD, k_BLKD, v_BLKE, mesh, layout, spec, sinks_H, kernel)


def attend_sharded(
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKE: Tensor,
    mesh: Mesh,
    layout: SequenceLayout,
    spec: AttentionSpec,
    sinks_H: Tensor | None,
    kernel: str,
    *,
    groups: int = 1,
    tape: Tape | None = None,
) -> Tensor:
    """`ulysses_attention` with its settings gathered in a spec, in head groups, on a layer's tape of anchors."""
    check_heads(q_BLHD.shape[2], k_BLKD.shape[2], mesh)
    check_name(kernel)
    _check_shards(q_BLHD, k_BLKD, v_BLKE, layout)
    _check_settings(q_BLHD, spec, sinks_H)
    split = split_heads(q_BLHD.shape[2], k_BLKD.shape[2], mesh.sp)
    if groups > 1 or tape is not None:
        count = min(groups, split.most_groups)
        plan = GroupPlan(layout, spec, split, count, kernel, mesh.sp_rank, mesh.sp_group)
        return grouped_attention(q_BLHD, k_BLKD, v_BLKE, sinks_H, plan, tape)
    local = LocalAttention(layout, spec, split.runs(mesh.sp_rank), kernel)
    out: Tensor = _Ulysses.apply(q_BLHD, k_BLKD, v_BLKE, sinks_H, _Plan(local, split, mesh.sp_rank, mesh.sp_group))
    return out


def _check_settings(q_BLHD: Tensor, spec: AttentionSpec, sinks_H: Tensor | None) -> None:
    if spec.window is not None and spec.window < 1:
        raise BatchError(f"window={spec.window}: a query sees at least itself, use window >= 1 or None")
    if spec.softcap is not None and not spec.softcap > 0:
        raise BatchError(f"softcap={spec.softcap}: scores are divided by it, use softcap > 0 or None")
    heads = q_BLHD.shape[2]
    if sinks_H is not None and sinks_H.shape != (heads,):
        raise BatchError(f"sinks_H has shape {list(sinks_H.shape)}: one score for each of the {heads} heads is needed")


def check_heads(heads: int, kv_heads: int, mesh: Mesh) -> None:
    """Refuse a degree the heads cannot carry, naming one that they can."""
    if mesh.ring > 1:
        raise UnsupportedError(f"ring={mesh.ring} is not built yet: use ring=1 with sp up to the head count, {heads}")
    if mesh.sp > heads:
        best = largest_divisor(mesh.world, heads)
        raise MeshError(
            f"{heads} heads over sp={mesh.sp}: every rank needs a head, use sp={best} with dp={mesh.world // best}"
        )
    split_heads(heads, kv_heads, mesh.sp)


def _check_shards(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> None:
    expected = (layout.batch, layout.shard_length)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if tuple(x.shape[:2]) != expected:
            raise BatchError(
                f"{name} has shape {list(x.shape)}: the layout says [B, L] = {list(expected)} on every rank"
            )
    if k.shape[2] != v.shape[2] or k.shape[3] != q.shape[3]:
        raise BatchError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: k has v's heads and q's head size")
    if not q.dtype == k.dtype == v.dtype:
        raise BatchError(f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}: one dtype is needed, they travel together")


@dataclass(frozen=True, slots=True)
class _Plan:
    local: LocalAttention
    split: HeadSplit
    rank: int
    group: dist.ProcessGroup

    @property
    def alone(self) -> bool:
        return len(self.split.q) == 1

    def lanes(self, *, key: int, value: int) -> tuple[Lane, Lane, Lane, Lane]:
        """q, k, v and output, as they travel."""
        query, kv = self.split.q, self.split.kv
        return (
            Lane(query, self.split.heads, key),
            Lane(kv, self.split.kv_heads, key),
            Lane(kv, self.split.kv_heads, value),
            Lane(query, self.split.heads, value),
        )

    def own(self, sinks_H: Tensor | None) -> Tensor | None:
        start, end = self.split.q[self.rank]
        return None if sinks_H is None else sinks_H[start:end]


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, plan: _Plan) -> Tensor:
        q_lane, k_lane, v_lane, out_lane = plan.lanes(key=q.shape[-1], value=v.shape[-1])
        if not plan.alone:
            q, k, v = to_heads([q, k, v], [q_lane, k_lane, v_lane], plan.group)
        out_BShE, lse_BhS = plan.local.attend(q, k, v, plan.own(sinks_H))
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out_BShE, lse_BhS, sinks_H)
        return out_BShE if plan.alone else to_tokens([out_BShE], [out_lane], plan.group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        q, k, v, out, lse, sinks_H = ctx.saved_tensors
        q_lane, k_lane, v_lane, out_lane = plan.lanes(key=q.shape[-1], value=v.shape[-1])
        if not plan.alone:
            (dout,) = to_heads([dout], [out_lane], plan.group)
        dsinks = None
        if sinks_H is not None:
            dsinks = torch.zeros_like(sinks_H)
            start, end = plan.split.q[plan.rank]
            dsinks[start:end] = plan.local.sinks_backward(dout, out, lse, sinks_H[start:end])
        grads = list(plan.local.attend_backward(dout, q, k, v, out, lse, with_sinks=sinks_H is not None))
        if not plan.alone:
            grads = to_tokens(grads, [q_lane, k_lane, v_lane], plan.group)
        return (*grads, dsinks, None)
