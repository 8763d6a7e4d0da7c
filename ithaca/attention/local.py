"""Attention over whole sequences on one rank: documents, unequal head groups and sinks, over any kernel.

`attend` returns `(out_BShE, lse_BhS)` and `attend_backward` takes them; both are outside autograd. A kernel is called
with one document, or through varlen with several short ones end to end, and with equally many query heads for each kv
head. Padding gets zero output and zero gradients, unless the layout asks for more (`padding_queries.py`).

Example: one row of 100K tokens, documents A (60K), B (1K), C (2K), D (37K), and 3 padding tokens:

    one kernel for both forms    A, B, C, D: one varlen call | padding: zeros
    a varlen kernel beside a     A: dense | B, C: one varlen call | D: dense | padding: zeros
    faster dense one
    no varlen kernel             A: dense | B: dense | C: dense | D: dense | padding: zeros

A call of more elements than its kernel takes (2^31 of most) is cut by rows, then by heads.

Sinks need no kernel that knows them: with a sink s the softmax has one more key of score s and value 0, so lse' = log(e^lse +
e^s) and out' = out * e^(lse - lse'). The ordinary backward evaluated at (out', lse') is then right,
and ds = -sum of e^(s - lse') * (dout . out').
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ithaca.attention.clock import ATTENTION, CLOCK
from ithaca.attention.kernels import choose
from ithaca.attention.kernels.interface import QKV, AttentionSpec, DocumentOffsets, Gradients, Kernel
from ithaca.attention.padding_queries import PaddingAttention
from ithaca.heads import HeadRange
from ithaca.sequence.layout import SequenceLayout, Span

# cuDNN takes about 95 ms to plan a length it has not seen; from 32K tokens on its lead over varlen repays that in one step.
LONG_DOCUMENT = 32_768


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call: rows and a span of tokens; `lengths` are those of its documents if there are several."""

    rows: slice
    span: Span
    lengths: tuple[int, ...] = ()


class _Latest:
    """Kernel calls and offsets on the device that were derived from the latest layout, for all layers of a step."""

    def __init__(self) -> None:
        self._latest: tuple[SequenceLayout | None, dict[Any, Any]] = None, {}

    def of(self, layout: SequenceLayout) -> dict[Any, Any]:
        # One assignment, because a GPU's backward pass runs in a thread of its own.
        latest, derived = self._latest
        if latest != layout:
            derived = {}
            self._latest = layout, derived
        return derived


_LATEST = _Latest()


def plan_calls(layout: SequenceLayout, *, varlen: bool, long_alone: bool = True) -> list[KernelCall]:
    """Return the kernel calls that cover every document once. `long_alone`: a dense kernel is faster for long ones."""
    derived, key = _LATEST.of(layout), (varlen, long_alone)
    if key not in derived:
        derived[key] = _planned_calls(layout, varlen=varlen, long_alone=long_alone)
    calls: list[KernelCall] = derived[key]
    return calls


def _planned_calls(layout: SequenceLayout, *, varlen: bool, long_alone: bool) -> list[KernelCall]:
    if layout.uniform:
        # Equal rows share their calls; varlen takes rows one by one, so it pays only for short documents.
        documents = layout.documents[0]
        if not varlen or len(documents) == 1:
            return [KernelCall(slice(None), span) for span in documents]
    calls: list[KernelCall] = []
    for b, documents in enumerate(layout.documents):
        row = slice(b, b + 1)
        short: list[Span] = []
        for span in documents:
            alone = not varlen or len(documents) == 1 or (long_alone and span[1] - span[0] >= LONG_DOCUMENT)
            if alone or (short and short[-1][1] != span[0]):
                calls += _run_of_short(row, short)
                short = []
            if alone:
                calls.append(KernelCall(row, span))
            else:
                short.append(span)
        calls += _run_of_short(row, short)
    return calls


def within_limit(call: KernelCall, run: HeadRange, qkv: QKV, most: int) -> Iterator[tuple[KernelCall, HeadRange]]:
    """Yield the call in parts of at most `most` elements of q, k, v or out.

    It is cut by rows; a row too large by its kv heads; a kv head too large by the query heads that share it.
    """
    rows = range(*call.rows.indices(qkv.q.shape[0]))
    (first, last), (first_kv, last_kv) = run.q, run.kv
    group, kv_heads = (last - first) // (last_kv - first_kv), last_kv - first_kv
    # There are no fewer query heads than kv heads, so q or out is the largest; some kernels pad head sizes, to 32.
    of_head = (call.span[1] - call.span[0]) * 32 * -(-max(qkv.q.shape[-1], qkv.v.shape[-1]) // 32)
    if len(rows) * (last - first) * of_head <= most:
        yield call, run
        return
    together = max(1, most // ((last - first) * of_head))
    some_kv = min(kv_heads, max(1, most // (group * of_head)))
    some = min(group, max(1, most // of_head))
    for row in range(rows.start, rows.stop, together):
        part = replace(call, rows=slice(row, min(row + together, rows.stop)))
        for kv in range(0, kv_heads, some_kv):
            end = min(kv + some_kv, kv_heads)
            start, stop = first + kv * group, first + end * group
            # Several kv heads at once have all their query heads.
            step = some if some < group else stop - start
            for q in range(start, stop, step):
                yield part, HeadRange((q, min(q + step, stop)), (first_kv + kv, first_kv + end))


def _run_of_short(row: slice, short: list[Span]) -> list[KernelCall]:
    if not short:
        return []
    lengths = tuple(end - start for start, end in short)
    return [KernelCall(row, (short[0][0], short[-1][1]), lengths if len(lengths) > 1 else ())]


@dataclass(frozen=True, slots=True)
class LocalAttention:
    """One rank's attention of one layer, `runs` of its heads; the same object serves forward and backward."""

    layout: SequenceLayout
    spec: AttentionSpec
    runs: tuple[HeadRange, ...]
    kernel: str = "auto"

    @CLOCK.timed(ATTENTION)
    def attend(self, qkv: QKV, sinks_h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(qkv)
        parts = list(self._parts(qkv))
        qkv = self._with_sinks(qkv, sinks_h, parts)
        if len(parts) == 1 and self._is_whole_call(parts[0][1], qkv.q):
            out_BShE, lse_BhS = parts[0][0].forward(qkv, self.spec)
        else:
            # In the layout of the send buffer, so that the exchange back needs no copy.
            batch, total, heads = qkv.q.shape[:3]
            out_BShE = qkv.v.new_zeros(total, batch, heads, qkv.v.shape[-1]).transpose(0, 1)
            exact = torch.promote_types(qkv.q.dtype, torch.float32)
            lse_BhS = qkv.q.new_zeros((batch, heads, total), dtype=exact)
            for kernel, call, run in parts:
                out, lse = self._call_forward(kernel, _cut_qkv(qkv, call, run), call)
                _cut(out_BShE, call, run.q).copy_(out)
                _cut_lse(lse_BhS, call, run.q).copy_(lse)
            if self.layout.padding != "zero":
                padding = PaddingAttention(self.layout, self.spec, self.runs, sinks_h is not None)
                padding.attend(qkv, out_BShE, lse_BhS)
        if sinks_h is None or qkv.sinks is not None:
            return out_BShE, lse_BhS
        return self._rescale(out_BShE, lse_BhS, sinks_h)

    @CLOCK.timed(ATTENTION)
    def attend_backward(
        self, dout_BShE: Tensor, qkv: QKV, out_BShE: Tensor, lse_BhS: Tensor, sinks_h: Tensor | None = None
    ) -> tuple[Gradients, Tensor | None]:
        """Return `(dq, dk, dv)`, and the gradient of this rank's sinks, `[h]`, if there are any."""
        parts = list(self._parts(qkv))
        qkv = self._with_sinks(qkv, sinks_h, parts)
        from_kernels = None if qkv.sinks is None else torch.zeros_like(qkv.sinks)
        dsinks = from_kernels
        if sinks_h is not None and from_kernels is None:
            dsinks = self.sinks_backward(dout_BShE, out_BShE, lse_BhS, sinks_h)
        if len(parts) == 1 and self._is_whole_call(parts[0][1], qkv.q):
            kernel, call, _ = parts[0]
            return self._call_backward(kernel, dout_BShE, qkv, out_BShE, lse_BhS, call, from_kernels), dsinks
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in qkv.tensors)
        for kernel, call, run in parts:
            dout, out = _cut(dout_BShE, call, run.q), _cut(out_BShE, call, run.q)
            lse = _cut_lse(lse_BhS, call, run.q)
            own = None if from_kernels is None else from_kernels[slice(*run.q)]
            pieces = self._call_backward(kernel, dout, _cut_qkv(qkv, call, run), out, lse, call, own)
            # Calls may share a kv head: its gradients add up.
            for grad, piece, r in zip((dq, dk, dv), pieces, (run.q, run.kv, run.kv), strict=True):
                _cut(grad, call, r).add_(piece)
        if self.layout.padding != "zero":
            padding = PaddingAttention(self.layout, self.spec, self.runs, sinks_h is not None)
            padding.attend_backward(dout_BShE, qkv, out_BShE, lse_BhS, (dq, dk, dv))
        return (dq, dk, dv), dsinks

    def _call_forward(self, kernel: Kernel, qkv: QKV, call: KernelCall) -> tuple[Tensor, Tensor]:
        if not call.lengths:
            return kernel.forward(qkv, self.spec)
        out, lse = kernel.forward(_end_to_end(qkv, call, self.layout), self.spec)
        return out[None], lse[None]

    def _call_backward(
        self, kernel: Kernel, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, call: KernelCall, dsinks: Tensor | None
    ) -> Gradients:
        """Return the gradients of one call; that of its sinks is added to `dsinks`, where the kernel takes them."""
        if call.lengths:
            dout, qkv, out, lse = dout[0], _end_to_end(qkv, call, self.layout), out[0], lse[0]
        if dsinks is None:
            grads = kernel.backward(dout, qkv, out, lse, self.spec)
        else:
            grads, piece = kernel.backward_with_sinks(dout, qkv, out, lse, self.spec)
            dsinks += piece
        return (grads[0][None], grads[1][None], grads[2][None]) if call.lengths else grads

    def sinks_backward(self, dout_BShE: Tensor, out_BShE: Tensor, lse_BhS: Tensor, sinks_h: Tensor) -> Tensor:
        """Return the gradient of this rank's sinks, `[h]`, in lse's precision."""
        delta_BhS = (dout_BShE.to(lse_BhS.dtype) * out_BShE.to(lse_BhS.dtype)).sum(-1).transpose(1, 2)
        weight_BhS = torch.exp(sinks_h.to(lse_BhS.dtype)[:, None] - lse_BhS)
        # Padding that attends to nothing has zero output, so its delta is zero whatever its weight.
        return -(weight_BhS * delta_BhS).sum((0, 2))

    def _with_sinks(self, qkv: QKV, sinks_h: Tensor | None, parts: list[tuple[Kernel, KernelCall, HeadRange]]) -> QKV:
        """Return the tensors with the sinks if every kernel takes them; padding that attends is rescaled with the rest."""
        if sinks_h is None or self.layout.padding != "zero" or not all(kernel.takes_sinks for kernel, _, _ in parts):
            return qkv
        return replace(qkv, sinks=sinks_h.detach().to(torch.float32))

    def _parts(self, qkv: QKV) -> Iterator[tuple[Kernel, KernelCall, HeadRange]]:
        dense = choose(self.kernel, qkv.q, qkv.v, self.spec)
        several = any(len(row) > 1 for row in self.layout.documents)
        packed = choose(self.kernel, qkv.q, qkv.v, self.spec, varlen=True) if several else None
        for call in plan_calls(self.layout, varlen=packed is not None, long_alone=packed is not dense):
            for run in self.runs:
                kernel = packed if call.lengths and packed else dense
                for smaller, heads in within_limit(call, run, qkv, kernel.most_elements):
                    yield kernel, smaller, heads

    def _is_whole_call(self, call: KernelCall, q_BShD: Tensor) -> bool:
        whole = call.rows == slice(None) or q_BShD.shape[0] == 1
        return whole and not call.lengths and call.span == (0, q_BShD.shape[1])

    def _rescale(self, out_BShE: Tensor, lse_BhS: Tensor, sinks_h: Tensor) -> tuple[Tensor, Tensor]:
        with_sink = torch.logaddexp(lse_BhS, sinks_h.to(lse_BhS.dtype)[:, None].expand_as(lse_BhS))
        share_BShE = torch.exp(lse_BhS - with_sink).transpose(1, 2).unsqueeze(-1)
        return (out_BShE.to(lse_BhS.dtype) * share_BShE).to(out_BShE.dtype), with_sink

    def _check(self, qkv: QKV) -> None:
        assert qkv.q.shape[:2] == (self.layout.batch, self.layout.padded), (qkv.q.shape, self.layout)
        assert qkv.k.shape[:3] == qkv.v.shape[:3], (qkv.k.shape, qkv.v.shape)
        assert (qkv.q.shape[2], qkv.k.shape[2]) == (self.runs[-1].q[1], self.runs[-1].kv[1]), self.runs


def _cut(x_BShD: Tensor, call: KernelCall, heads: tuple[int, int]) -> Tensor:
    return x_BShD[call.rows, call.span[0] : call.span[1], heads[0] : heads[1]]


def _cut_qkv(qkv: QKV, call: KernelCall, run: HeadRange) -> QKV:
    sinks = None if qkv.sinks is None else qkv.sinks[slice(*run.q)]
    return QKV(_cut(qkv.q, call, run.q), _cut(qkv.k, call, run.kv), _cut(qkv.v, call, run.kv), sinks=sinks)


def _cut_lse(lse_BhS: Tensor, call: KernelCall, heads: tuple[int, int]) -> Tensor:
    return lse_BhS[call.rows, heads[0] : heads[1], call.span[0] : call.span[1]]


def _end_to_end(qkv: QKV, call: KernelCall, layout: SequenceLayout) -> QKV:
    """Return the varlen form of a call's only row: [1, S, h, D] -> [S, h, D]."""
    key = call.rows.start, call.span, qkv.q.device
    derived = _LATEST.of(layout)
    bounds: DocumentOffsets | None = derived.get(key)
    if bounds is None:
        offsets = torch.tensor([0, *call.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        bounds = DocumentOffsets(offsets.to(qkv.q.device, non_blocking=True), max(call.lengths))
        # A rehearsal's fake tensors belong to their mode.
        if not isinstance(qkv.q, FakeTensor):
            derived[key] = bounds
    return QKV(qkv.q[0], qkv.k[0], qkv.v[0], bounds, qkv.sinks)
