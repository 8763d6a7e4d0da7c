"""Ulysses attention: exchange, attend with the rank's own heads over the whole sequence, exchange back.

    before      rank 0: tokens 0-3, heads 0-7      rank 1: tokens 4-7, heads 0-7
                              all-to-all of q, k, v, in one collective
    attention   rank 0: tokens 0-7, heads 0-3      rank 1: tokens 0-7, heads 4-7
                              all-to-all of the output
    after       rank 0: tokens 0-3, heads 0-7      rank 1: tokens 4-7, heads 0-7

In: shards `q_BLHD, k_BLKD, v_BLKE`, tokens in layout order. Out: `out_BLHE`. Two collectives forward, two backward, for
each head group. Long shards go group by group: the next group is on the wire while one attends, and whole-sequence
buffers exist for two groups at a time, not for all heads.

What backward starts from:

    one group, no tape   q, k, v and the output as they arrived, whole sequences of the rank's heads: the way out is not
                         repeated, so backward sends the output's gradient alone
    groups or a tape     the shards and an anchor (tape.py): q, k, v, the output and its gradient travel together

All that backward needs lives on the autograd context, since CUDA runs backward on another thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.arguments import check_flag, check_kind, named_arguments, shown
from ithaca.attention.exchange import Lane, Pending, start_to_heads, start_to_tokens
from ithaca.attention.kernels import check_name
from ithaca.attention.kernels.interface import QKV, AttentionSpec
from ithaca.attention.local import LocalAttention
from ithaca.attention.tape import Anchor, Tape
from ithaca.errors import ArgumentError, BatchError, MeshError, UnsupportedError
from ithaca.heads import HeadSplit, Range, split_heads
from ithaca.mesh import Mesh, check_mesh, largest_divisor
from ithaca.quantities import finite_or_nan
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
    for name, tensor in (("q_BLHD", q_BLHD), ("k_BLKD", k_BLKD), ("v_BLKE", v_BLKE)):
        check_kind(name, tensor, Tensor, "pass a tensor [B, L, heads, head size] of this rank's tokens")
        if tensor.dim() != 4 or not tensor.is_floating_point():
            raise BatchError(
                f"{name} is {list(tensor.shape)} of {tensor.dtype}: floating-point numbers [B, L, heads, head size] are needed"
            )
    check_kind("layout", layout, SequenceLayout, "pass the SequenceLayout of the batch, as shard_batch gives it")
    check_flag("causal", causal)
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and math.isnan(finite_or_nan(number)):
            raise ArgumentError(f"{name}={shown(number)}: pass a number, or None")
    if window is not None:
        check_kind("window", window, int, "pass a whole number of tokens, or None")
    if sinks_H is not None:
        check_kind("sinks_H", sinks_H, Tensor, "pass a tensor of one score a head, or None")
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
    plan = UlyssesPlan(layout, spec, split, min(groups, split.most_groups), kernel, mesh.sp_rank, mesh.sp_group)
    return planned_attention(q_BLHD, k_BLKD, v_BLKE, sinks_H, plan, tape)


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
class UlyssesPlan:
    """One attention layer, cut into head groups over a sequence group's ranks."""

    layout: SequenceLayout
    spec: AttentionSpec
    split: HeadSplit
    groups: int
    kernel: str
    rank: int
    group: dist.ProcessGroup

    @property
    def alone(self) -> bool:
        """True if one rank has the whole sequence, so that nothing travels."""
        return len(self.split.q) == 1

    @property
    def shares_kv(self) -> bool:
        """True if some kv head is used by several ranks, so that its gradients meet."""
        return self.split.kv_copies > self.split.kv_heads

    def parts(self) -> list[HeadSplit]:
        return [self.split.group(index, self.groups) for index in range(self.groups)]

    def local(self, part: HeadSplit) -> LocalAttention:
        return LocalAttention(self.layout, self.spec, part.runs(self.rank), self.kernel)

    def own_sinks(self, sinks_H: Tensor | None, part: HeadSplit) -> Tensor | None:
        return None if sinks_H is None else sinks_H[slice(*part.q[self.rank])]

    def gather(self, tensors_BLHD: list[Tensor], ranges: list[tuple[Range, ...]]) -> Pending | list[Tensor]:
        """Whole sequences of each tensor's heads in `ranges`: on the wire, or on one rank simply slices."""
        if self.alone:
            return [x[:, :, r[0][0] : r[0][1]] for x, r in zip(tensors_BLHD, ranges, strict=True)]
        lanes = [Lane(r, x.shape[2], x.shape[3]) for x, r in zip(tensors_BLHD, ranges, strict=True)]
        return start_to_heads(tensors_BLHD, lanes, self.group)

    def scatter(
        self, tensors_BShD: list[Tensor], ranges: list[tuple[Range, ...]], into: list[Tensor]
    ) -> Pending | None:
        """Back to the tokens' owners; `into` are whole `[B, L, H, D]` tensors, q's first."""
        if self.alone:
            for x, r, target in zip(tensors_BShD, ranges, into, strict=True):
                target[:, :, r[0][0] : r[0][1]].copy_(x)
            return None
        lanes = [Lane(r, x.shape[2], x.shape[3]) for x, r in zip(into, ranges, strict=True)]
        shared = [False] + [self.shares_kv] * (len(into) - 1)
        return start_to_tokens(tensors_BShD, lanes, self.group, into, shared)


def planned_attention(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKE: Tensor, sinks_H: Tensor | None, plan: UlyssesPlan, tape: Tape | None
) -> Tensor:
    """Return `[B, L, H, E]`; write an anchor on the tape, or start from the one that is read there."""
    anchor = tape.read() if tape is not None else None
    if anchor is not None:
        # As many groups as the anchor was made in: another pass may have come since, under another plan.
        plan = replace(plan, groups=len(anchor.lse_BhS))
    out, *lse = _Ulysses.apply(q_BLHD, k_BLKD, v_BLKE, sinks_H, plan, anchor, tape is None and plan.groups == 1)
    if tape is not None and anchor is None:
        tape.anchors.append(Anchor(out.detach(), tuple(lse)))
    return out


class _Ulysses(torch.autograd.Function):
    """`keeps`: save what arrived (one group, no tape) and not the shards."""

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
        # A fresh alias: the anchor's own tensor must not be drawn into this graph.
        return (anchor.out_BLHE.detach(), *anchor.lse_BhS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        plan: UlyssesPlan = ctx.plan
        sinks_H, *saved = ctx.saved_tensors
        needed = _kept(dout, saved, plan) if ctx.keeps else _gathered(dout, saved, plan)
        return (*_attend_backward(needed, dout.shape[1], sinks_H, plan), None, None, None)


def _overlapped(
    plan: UlyssesPlan, tensors: list[Tensor], ranges: list[list[tuple[Range, ...]]]
) -> Iterator[list[Tensor]]:
    """Every group's gathered tensors, the next group's exchange under way."""
    coming = plan.gather(tensors, ranges[0])
    for index in range(len(ranges)):
        arrived = coming.wait() if isinstance(coming, Pending) else coming
        if index + 1 < len(ranges):
            coming = plan.gather(tensors, ranges[index + 1])
        yield arrived


def _qkv(arrived: list[Tensor]) -> QKV:
    return QKV(arrived[0], arrived[1], arrived[2])


def _attend(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, plan: UlyssesPlan) -> tuple[Anchor, list[Tensor]]:
    """Return the anchor, and of the last group q, k, v and the output as the kernel had them."""
    parts = plan.parts()
    lse: list[Tensor] = []
    arrived: list[Tensor] = []
    out_BLHE: Tensor | None = None
    returning: Pending | None = None
    for part, arrived in zip(parts, _overlapped(plan, [q, k, v], [[p.q, p.kv, p.kv] for p in parts]), strict=True):
        out_BShE, lse_BhS = plan.local(part).attend(_qkv(arrived), plan.own_sinks(sinks_H, part))
        lse.append(lse_BhS)
        arrived = [*arrived, out_BShE]
        if returning is not None:
            returning.wait()
        if plan.alone and plan.groups == 1:
            return Anchor(out_BShE, (lse_BhS,)), arrived
        if out_BLHE is None:
            out_BLHE = q.new_empty(*q.shape[:3], v.shape[-1])
        returning = plan.scatter([out_BShE], [part.q], [out_BLHE])
    if returning is not None:
        returning.wait()
    assert out_BLHE is not None
    return Anchor(out_BLHE, tuple(lse)), arrived


@dataclass(frozen=True, slots=True)
class _Needed:
    """What one head group's backward takes, over whole sequences."""

    part: HeadSplit
    qkv: QKV
    dout_BShE: Tensor
    out_BShE: Tensor
    lse_BhS: Tensor


def _kept(dout: Tensor, saved: list[Tensor], plan: UlyssesPlan) -> Iterator[_Needed]:
    q, k, v, out, lse = saved
    (part,) = plan.parts()
    for (dout_BShE,) in _overlapped(plan, [dout], [[part.q]]):
        yield _Needed(part, QKV(q, k, v), dout_BShE, out, lse)


def _gathered(dout: Tensor, saved: list[Tensor], plan: UlyssesPlan) -> Iterator[_Needed]:
    q, k, v, out, *lse = saved
    parts = plan.parts()
    ranges = [[part.q, part.kv, part.kv, part.q, part.q] for part in parts]
    for part, arrived, lse_BhS in zip(parts, _overlapped(plan, [q, k, v, dout, out], ranges), lse, strict=True):
        yield _Needed(part, _qkv(arrived), arrived[3], arrived[4], lse_BhS)


def _attend_backward(
    groups: Iterator[_Needed], length: int, sinks_H: Tensor | None, plan: UlyssesPlan
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv of the shard, and this rank's part of the sinks' gradient."""
    dsinks = None if sinks_H is None else torch.zeros_like(sinks_H)
    grads: list[Tensor] = []
    returning: Pending | None = None
    dtype = None
    for needed in groups:
        part, local = needed.part, plan.local(needed.part)
        sinks_h = plan.own_sinks(sinks_H, part)
        if dsinks is not None and sinks_h is not None:
            dsinks[slice(*part.q[plan.rank])] = local.sinks_backward(
                needed.dout_BShE, needed.out_BShE, needed.lse_BhS, sinks_h
            )
        pieces = list(
            local.attend_backward(
                needed.dout_BShE, needed.qkv, needed.out_BShE, needed.lse_BhS, with_sinks=sinks_h is not None
            )
        )
        if plan.alone and plan.groups == 1:
            return (*pieces, dsinks)
        if not grads:
            grads, dtype = _blank_gradients(pieces, length, plan), pieces[1].dtype
        if returning is not None:
            returning.wait()
        returning = plan.scatter(pieces, [part.q, part.kv, part.kv], grads)
    if returning is not None:
        returning.wait()
    return (grads[0], grads[1].to(dtype), grads[2].to(dtype), dsinks)


def _blank_gradients(pieces_BShD: list[Tensor], length: int, plan: UlyssesPlan) -> list[Tensor]:
    """Where several ranks had a kv head their gradients meet in fp32; elsewhere each is written once."""
    dq, dk, dv = pieces_BShD
    wide = torch.promote_types(dk.dtype, torch.float32) if plan.shares_kv else dk.dtype
    blank = torch.zeros if plan.shares_kv else torch.empty
    shape = (dq.shape[0], length)
    return [
        dq.new_empty(*shape, plan.split.heads, dq.shape[-1]),
        *(blank((*shape, plan.split.kv_heads, x.shape[-1]), dtype=wide, device=x.device) for x in (dk, dv)),
    ]
