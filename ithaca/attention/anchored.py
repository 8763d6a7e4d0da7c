"""Attention that leaves an anchor, attention that starts from one, and head groups.

An anchor is what an attention call gave: its output, kept token-sharded, and its lse. A layer that is run again in
backward takes the anchor instead of attending again: forward hands out the saved output, backward needs q, k, v over
the whole sequence and gets them in one exchange together with the output and its gradient. So a replay costs no
collective and a backward two, and attention forward runs once a step.

Long shards go head group by head group: the next group is on the wire while this one attends, and whole-sequence
buffers exist for two groups at a time, not for all heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.attention.exchange import Lane, Pending, start_to_heads, start_to_tokens
from ithaca.attention.heads import HeadSplit
from ithaca.attention.kernels.interface import AttentionSpec
from ithaca.attention.local import LocalAttention
from ithaca.sequence.layout import SequenceLayout


@dataclass(frozen=True, slots=True)
class Anchor:
    """`out_BLHE` of all heads for this rank's tokens; `lse_BhS[g]` of group g's heads on this rank for all tokens."""

    out_BLHE: Tensor
    lse_BhS: tuple[Tensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.out_BLHE, *self.lse_BhS]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Anchor:
        return cls(tensors[0], tuple(tensors[1:]))


@dataclass(slots=True)
class Tape:
    """The anchors of one run of a layer, in the order its attention is called: written, or read again."""

    anchors: list[Anchor] = field(default_factory=list)
    replaying: bool = False
    position: int = 0

    def read(self) -> Anchor | None:
        """The next anchor when replaying, None when recording."""
        if not self.replaying:
            return None
        self.position += 1
        return self.anchors[self.position - 1]

    def replay(self) -> Tape:
        return Tape(self.anchors, replaying=True)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What travels down a model to its attention: the layout, and the layer's tape where there is one."""

    layout: SequenceLayout
    tape: Tape | None = None


@dataclass(frozen=True, slots=True)
class GroupPlan:
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
        return len(self.split.q) == 1

    def parts(self) -> Iterator[HeadSplit]:
        return (self.split.group(index, self.groups) for index in range(self.groups))

    def local(self, part: HeadSplit) -> LocalAttention:
        return LocalAttention(self.layout, self.spec, part.runs(self.rank), self.kernel)

    def gather(self, tensors_BLHD: list[Tensor], part: HeadSplit) -> Pending | list[Tensor]:
        """Whole sequences of one group's heads: on the wire, or on one rank simply a slice."""
        # q, k, v, and in backward the output's gradient and the output.
        ranges = [part.q, part.kv, part.kv, part.q, part.q][: len(tensors_BLHD)]
        if self.alone:
            return [x[:, :, r[0][0] : r[0][1]] for x, r in zip(tensors_BLHD, ranges, strict=True)]
        lanes = [Lane(r, x.shape[2], x.shape[3]) for x, r in zip(tensors_BLHD, ranges, strict=True)]
        return start_to_heads(tensors_BLHD, lanes, self.group)

    @property
    def shares_kv(self) -> bool:
        """Whether some kv head is used by several ranks, so that its gradients meet."""
        return self.split.kv_copies > self.split.kv_heads

    def scatter(self, tensors_BShD: list[Tensor], ranges: list[Any], into: list[Tensor]) -> Pending | None:
        """Back to the tokens' owners; `into` are whole `[B, L, H, D]` tensors, q's first."""
        if self.alone:
            for x, r, target in zip(tensors_BShD, ranges, into, strict=True):
                target[:, :, r[0][0] : r[0][1]].copy_(x)
            return None
        lanes = [Lane(r, x.shape[2], x.shape[3]) for x, r in zip(into, ranges, strict=True)]
        shared = [False] + [self.shares_kv] * (len(into) - 1)
        return start_to_tokens(tensors_BShD, lanes, self.group, into, shared)


def grouped_attention(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKE: Tensor, sinks_H: Tensor | None, plan: GroupPlan, tape: Tape | None
) -> Tensor:
    """`[B, L, H, E]`; writes an anchor on the tape, or starts from the one it finds there."""
    anchor = tape.read() if tape is not None else None
    if anchor is not None:
        # As many as it was made in: another pass may have come since, under another plan.
        plan = replace(plan, groups=len(anchor.lse_BhS))
    out, *lse = _Grouped.apply(q_BLHD, k_BLKD, v_BLKE, sinks_H, plan, anchor)
    if tape is not None and anchor is None:
        tape.anchors.append(Anchor(out.detach(), tuple(lse)))
    return out


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, plan: GroupPlan, anchor: Anchor | None
    ) -> tuple[Tensor, ...]:
        if anchor is None:
            anchor = _attend(q, k, v, sinks_H, plan)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, sinks_H, *anchor.tensors)
        ctx.mark_non_differentiable(*anchor.lse_BhS)
        # A fresh alias: the anchor's own tensor must not be drawn into this graph.
        return (anchor.out_BLHE.detach(), *anchor.lse_BhS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, *tensors = ctx.saved_tensors
        return (*_attend_backward(dout, q, k, v, sinks_H, Anchor.of(tensors), ctx.plan), None, None)


def _ahead(plan: GroupPlan, tensors: list[Tensor]) -> Iterator[tuple[HeadSplit, list[Tensor]]]:
    """Every group with its gathered tensors, the next group's exchange under way."""
    parts = list(plan.parts())
    coming = plan.gather(tensors, parts[0])
    for index, part in enumerate(parts):
        arrived = coming.wait() if isinstance(coming, Pending) else coming
        if index + 1 < len(parts):
            coming = plan.gather(tensors, parts[index + 1])
        yield part, arrived


def _attend(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, plan: GroupPlan) -> Anchor:
    out_BLHE = q.new_empty(*q.shape[:3], v.shape[-1])
    lse: list[Tensor] = []
    returning: Pending | None = None
    for part, (q_BShD, k_BSkD, v_BSkE) in _ahead(plan, [q, k, v]):
        own = slice(*part.q[plan.rank])
        sinks_h = None if sinks_H is None else sinks_H[own]
        out_BShE, lse_BhS = plan.local(part).attend(q_BShD, k_BSkD, v_BSkE, sinks_h)
        lse.append(lse_BhS)
        if returning is not None:
            returning.wait()
        if plan.alone and plan.groups == 1:
            return Anchor(out_BShE, (lse_BhS,))
        returning = plan.scatter([out_BShE], [part.q], [out_BLHE])
    if returning is not None:
        returning.wait()
    return Anchor(out_BLHE, tuple(lse))


def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, anchor: Anchor, plan: GroupPlan
) -> tuple[Tensor | None, ...]:
    dsinks = None if sinks_H is None else torch.zeros_like(sinks_H)
    grads: list[Tensor] = []
    returning: Pending | None = None
    travelling = [q, k, v, dout, anchor.out_BLHE]
    for (part, (q_g, k_g, v_g, dout_g, out_g)), lse_g in zip(_ahead(plan, travelling), anchor.lse_BhS, strict=True):
        local = plan.local(part)
        if sinks_H is not None and dsinks is not None:
            own = slice(*part.q[plan.rank])
            dsinks[own] = local.sinks_backward(dout_g, out_g, lse_g, sinks_H[own])
        pieces = list(local.attend_backward(dout_g, q_g, k_g, v_g, out_g, lse_g, with_sinks=sinks_H is not None))
        if plan.alone and plan.groups == 1:
            return (*pieces, dsinks)
        grads = grads or _blank_gradients(q, k, v, plan)
        if returning is not None:
            returning.wait()
        returning = plan.scatter(pieces, [part.q, part.kv, part.kv], grads)
    if returning is not None:
        returning.wait()
    return (grads[0], grads[1].to(k.dtype), grads[2].to(v.dtype), dsinks)


def _blank_gradients(q: Tensor, k: Tensor, v: Tensor, plan: GroupPlan) -> list[Tensor]:
    """Where several ranks had a kv head their gradients meet in fp32; elsewhere each is written once."""
    wide = torch.promote_types(k.dtype, torch.float32) if plan.shares_kv else k.dtype
    blank = torch.zeros if plan.shares_kv else torch.empty
    return [torch.empty_like(q), *(blank(x.shape, dtype=wide, device=x.device) for x in (k, v))]
