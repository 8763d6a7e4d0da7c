"""Ulysses attention: all-to-all to heads, attention over the whole sequence, all-to-all back to tokens.

    before      rank 0: tokens 0-3, heads 0-7      rank 1: tokens 4-7, heads 0-7
                              all-to-all of q, k, v, in one collective
    attention   rank 0: tokens 0-7, heads 0-3      rank 1: tokens 0-7, heads 4-7
                              all-to-all of the output
    after       rank 0: tokens 0-3, heads 0-7      rank 1: tokens 4-7, heads 0-7

In: shards `q_BLHD, k_BLKD, v_BLKE`, tokens in layout order. Out: `out_BLHE`. Each head group takes two collectives in
forward and two in backward. With several groups the exchange of one group overlaps the attention of the one before:

    wire      q k v of group 0 | q k v of 1 | out of 0, q k v of 2 | ...
    kernel                     | group 0    | group 1              | ...

Whole-sequence buffers then exist for two groups at a time, not for all heads. Backward starts from

    one group, no tape   the received q, k, v and the kernel's output, whole sequences of the rank's heads: only the
                         output's gradient is sent
    groups or a tape     the shards and an anchor (tape.py): q, k, v, the output and its gradient are sent together

All that backward needs is on the autograd context, since CUDA runs backward on another thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.arguments import named_arguments
from ithaca.attention.exchange import Pending, TensorColumns, start_to_heads, start_to_tokens
from ithaca.attention.input_checks import check_heads, check_options, check_shards, check_spec, check_tensors
from ithaca.attention.kernels import check_name
from ithaca.attention.kernels.interface import QKV, AttentionSpec
from ithaca.attention.local import LocalAttention
from ithaca.attention.tape import Anchor, Tape
from ithaca.heads import HeadSplit, Range, split_heads
from ithaca.mesh import Mesh, check_mesh
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
    """Return exact attention over the whole sequence, `[B, L, H, E]`; each rank passes its shard of tokens.

    `window`: a query sees keys less than `window` tokens away. `sinks_H`: one extra score a head. The
    gradient of `sinks_H` is this rank's part: sum it over ranks like any weight's.
    """
    check_mesh(mesh)
    check_tensors(q_BLHD=q_BLHD, k_BLKD=k_BLKD, v_BLKE=v_BLKE)
    check_options(layout, causal, window, sinks_H, scale=scale, softcap=softcap)
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
    """Return `ulysses_attention` of the settings in `spec`, computed in head groups, with anchors on `tape`."""
    heads, kv_heads = q_BLHD.shape[2], k_BLKD.shape[2]
    check_heads(heads, kv_heads, mesh)
    check_name(kernel)
    check_shards(q_BLHD, k_BLKD, v_BLKE, layout)
    check_spec(heads, spec, sinks_H)
    split = split_heads(heads, kv_heads, mesh.sp)
    plan = UlyssesPlan(layout, spec, split, min(groups, split.max_head_groups), kernel, mesh.sp_rank, mesh.sp_group)
    return planned_attention(q_BLHD, k_BLKD, v_BLKE, sinks_H, plan, tape)


@dataclass(frozen=True, slots=True)
class UlyssesPlan:
    """Plan of one attention layer: its heads cut into groups, over the ranks of a sequence group."""

    layout: SequenceLayout
    spec: AttentionSpec
    split: HeadSplit
    groups: int
    kernel: str
    rank: int
    group: dist.ProcessGroup

    @property
    def is_single_rank(self) -> bool:
        """True if one rank has the whole sequence, so that no collective is each."""
        return len(self.split.q) == 1

    @property
    def shares_kv(self) -> bool:
        """True if several ranks use a kv head, so that their gradients must be added."""
        return self.split.kv_copies > self.split.kv_heads

    def parts(self) -> list[HeadSplit]:
        return [self.split.group(index, self.groups) for index in range(self.groups)]

    def local(self, part: HeadSplit) -> LocalAttention:
        return LocalAttention(self.layout, self.spec, part.runs(self.rank), self.kernel)

    def own_sinks(self, sinks_H: Tensor | None, part: HeadSplit) -> Tensor | None:
        return None if sinks_H is None else sinks_H[slice(*part.q[self.rank])]

    def to_heads(self, tensors_BLHD: list[Tensor], ranges: list[tuple[Range, ...]]) -> Pending | list[Tensor]:
        """Start exchanging shards for whole sequences of the heads in `ranges`; on one rank return slices."""
        if self.is_single_rank:
            return [x[:, :, r[0][0] : r[0][1]] for x, r in zip(tensors_BLHD, ranges, strict=True)]
        all_columns = [TensorColumns(r, x.shape[2], x.shape[3]) for x, r in zip(tensors_BLHD, ranges, strict=True)]
        return start_to_heads(tensors_BLHD, all_columns, self.group)

    def to_tokens(
        self, tensors_BShD: list[Tensor], ranges: list[tuple[Range, ...]], into: list[Tensor]
    ) -> Pending | None:
        """Start returning heads to the tokens' owners, into whole `[B, L, H, D]` tensors, q's first.

        Return None on one rank, which copies.
        """
        if self.is_single_rank:
            for x, r, target in zip(tensors_BShD, ranges, into, strict=True):
                target[:, :, r[0][0] : r[0][1]].copy_(x)
            return None
        all_columns = [TensorColumns(r, x.shape[2], x.shape[3]) for x, r in zip(into, ranges, strict=True)]
        shared = [False] + [self.shares_kv] * (len(into) - 1)
        return start_to_tokens(tensors_BShD, all_columns, self.group, into, shared)


def planned_attention(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKE: Tensor, sinks_H: Tensor | None, plan: UlyssesPlan, tape: Tape | None
) -> Tensor:
    """Return `[B, L, H, E]`; start from the tape's anchor when the tape replays, else record one."""
    anchor = tape.read() if tape is not None else None
    if anchor is not None:
        # The anchor's number of groups: a later pass may have run under another plan.
        plan = replace(plan, groups=len(anchor.lse_BhS))
    out, *lse = _Ulysses.apply(q_BLHD, k_BLKD, v_BLKE, sinks_H, plan, anchor, tape is None and plan.groups == 1)
    if tape is not None and anchor is None:
        tape.anchors.append(Anchor(out.detach(), tuple(lse)))
    return out


class _Ulysses(torch.autograd.Function):
    """Autograd function of all forms. `keeps`: save the received tensors (one group, no tape), not the shards."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
        plan: UlyssesPlan,
        anchor: Anchor | None,
        keeps: bool,
    ) -> tuple[Tensor, ...]:
        saved = [q, k, v]
        if anchor is None:
            anchor, arrived = _attend(q, k, v, sinks_H, plan)
            saved = arrived if keeps else saved
        ctx.plan, ctx.keeps = plan, keeps
        ctx.save_for_backward(sinks_H, *saved, *(anchor.lse_BhS if keeps else anchor.tensors))
        ctx.mark_non_differentiable(*anchor.lse_BhS)
        # An alias: the anchor's own tensor must not become part of this graph.
        return (anchor.out_BLHE.detach(), *anchor.lse_BhS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        plan: UlyssesPlan = ctx.plan
        sinks_H, *saved = ctx.saved_tensors
        groups = _from_received(dout, saved, plan) if ctx.keeps else _from_shards(dout, saved, plan)
        return (*_attend_backward(groups, dout.shape[1], sinks_H, plan), None, None, None)


def _overlapped(
    plan: UlyssesPlan, tensors: list[Tensor], ranges: list[list[tuple[Range, ...]]]
) -> Iterator[list[Tensor]]:
    """Yield each group's gathered tensors, after starting the next group's exchange."""
    coming = plan.to_heads(tensors, ranges[0])
    for index in range(len(ranges)):
        arrived = coming.wait() if isinstance(coming, Pending) else coming
        if index + 1 < len(ranges):
            coming = plan.to_heads(tensors, ranges[index + 1])
        yield arrived


def _attend(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, plan: UlyssesPlan) -> tuple[Anchor, list[Tensor]]:
    """Return the anchor, and the last group's q, k, v and output in whole sequences."""
    parts = plan.parts()
    lse: list[Tensor] = []
    arrived: list[Tensor] = []
    out_BLHE: Tensor | None = None
    returning: Pending | None = None
    for part, arrived in zip(parts, _overlapped(plan, [q, k, v], [[p.q, p.kv, p.kv] for p in parts]), strict=True):
        out_BShE, lse_BhS = plan.local(part).attend(
            QKV(arrived[0], arrived[1], arrived[2]), plan.own_sinks(sinks_H, part)
        )
        lse.append(lse_BhS)
        arrived = [*arrived, out_BShE]
        if returning is not None:
            returning.wait()
        if plan.is_single_rank and plan.groups == 1:
            return Anchor(out_BShE, (lse_BhS,)), arrived
        if out_BLHE is None:
            out_BLHE = q.new_empty(*q.shape[:3], v.shape[-1])
        returning = plan.to_tokens([out_BShE], [part.q], [out_BLHE])
    if returning is not None:
        returning.wait()
    assert out_BLHE is not None
    return Anchor(out_BLHE, tuple(lse)), arrived


@dataclass(frozen=True, slots=True)
class _GroupTensors:
    """Inputs of one head group's backward, over whole sequences."""

    part: HeadSplit
    qkv: QKV
    dout_BShE: Tensor
    out_BShE: Tensor
    lse_BhS: Tensor


def _from_received(dout: Tensor, saved: list[Tensor], plan: UlyssesPlan) -> Iterator[_GroupTensors]:
    """Yield the only group's inputs: saved whole sequences, and the exchanged gradient of the output."""
    q, k, v, out, lse = saved
    (part,) = plan.parts()
    for (dout_BShE,) in _overlapped(plan, [dout], [[part.q]]):
        yield _GroupTensors(part, QKV(q, k, v), dout_BShE, out, lse)


def _from_shards(dout: Tensor, saved: list[Tensor], plan: UlyssesPlan) -> Iterator[_GroupTensors]:
    """Yield every group's inputs, exchanged again from the saved shards and the anchor."""
    q, k, v, out, *lse = saved
    parts = plan.parts()
    ranges = [[part.q, part.kv, part.kv, part.q, part.q] for part in parts]
    for part, arrived, lse_BhS in zip(parts, _overlapped(plan, [q, k, v, dout, out], ranges), lse, strict=True):
        yield _GroupTensors(part, QKV(arrived[0], arrived[1], arrived[2]), arrived[3], arrived[4], lse_BhS)


def _attend_backward(
    groups: Iterator[_GroupTensors], length: int, sinks_H: Tensor | None, plan: UlyssesPlan
) -> tuple[Tensor | None, ...]:
    """Return dq, dk, dv of the shard, and this rank's part of the sinks' gradient."""
    dsinks = None if sinks_H is None else torch.zeros_like(sinks_H)
    grads: list[Tensor] = []
    returning: Pending | None = None
    dtype = None
    for each in groups:
        part, local = each.part, plan.local(each.part)
        sinks_h = plan.own_sinks(sinks_H, part)
        grads_BShD, dsinks_h = local.attend_backward(each.dout_BShE, each.qkv, each.out_BShE, each.lse_BhS, sinks_h)
        pieces = list(grads_BShD)
        if dsinks is not None and dsinks_h is not None:
            dsinks[slice(*part.q[plan.rank])] = dsinks_h
        if plan.is_single_rank and plan.groups == 1:
            return (*pieces, dsinks)
        if not grads:
            grads, dtype = _blank_gradients(pieces, length, plan), pieces[1].dtype
        if returning is not None:
            returning.wait()
        returning = plan.to_tokens(pieces, [part.q, part.kv, part.kv], grads)
    if returning is not None:
        returning.wait()
    return (grads[0], grads[1].to(dtype), grads[2].to(dtype), dsinks)


def _blank_gradients(pieces_BShD: list[Tensor], length: int, plan: UlyssesPlan) -> list[Tensor]:
    """Return empty gradients of a shard; those of kv heads that several ranks had are fp32 zeros, to be added to."""
    dq, dk, dv = pieces_BShD
    wide = torch.promote_types(dk.dtype, torch.float32) if plan.shares_kv else dk.dtype
    blank = torch.zeros if plan.shares_kv else torch.empty
    shape = (dq.shape[0], length)
    return [
        dq.new_empty(*shape, plan.split.heads, dq.shape[-1]),
        *(blank((*shape, plan.split.kv_heads, x.shape[-1]), dtype=wide, device=x.device) for x in (dk, dv)),
    ]
