"""Kernels that take documents and sinks themselves: a stand-in on the CPU, against the way around kernels that do not.

What a GPU kernel would do in one call, the stand-in does document by document with the CPU's kernel, and rescales.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.attention import local
from ithaca.attention.kernels.cpu import CpuKernel
from ithaca.attention.kernels.interface import QKV, AttentionSpec
from ithaca.attention.local import LocalAttention
from ithaca.heads import HeadRange
from ithaca.sequence.layout import SequenceLayout

SPEC = AttentionSpec(0.2, window=6)
DOCUMENTS = torch.tensor([[0] * 9 + [1] + [2] * 12 + [-1] * 2, [0] * 4 + [1] * 20])
RUNS = (HeadRange((0, 2), (0, 1)), HeadRange((2, 6), (1, 3)))


class Standin(CpuKernel):
    name = "standin"
    varlen = takes_sinks = True

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        found = [super(Standin, self).forward(piece, spec) for piece in self.pieces(qkv)]
        out, lse = torch.cat([out for out, _ in found], 1), torch.cat([lse for _, lse in found], 2)
        if qkv.sinks is not None:
            wider = torch.logaddexp(lse, qkv.sinks.to(lse.dtype)[:, None].expand_as(lse))
            out, lse = out * torch.exp(lse - wider).transpose(1, 2)[..., None], wider
        return (out, lse) if qkv.bounds is None else (out[0], lse[0])

    def backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Any:
        if qkv.bounds is not None:
            dout, out, lse = dout[None], out[None], lse[None]
        found, at = [], 0
        for piece in self.pieces(qkv):
            span = slice(at, at := at + piece.q.shape[1])
            found.append(super().backward(dout[:, span], piece, out[:, span], lse[:, :, span], spec))
        grads = [torch.cat(parts, 1) for parts in zip(*found, strict=True)]
        return tuple(grads if qkv.bounds is None else [x[0] for x in grads])

    def backward_with_sinks(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Any:
        delta = (dout * out).sum(-1).transpose(-1, -2)
        weight = torch.exp(qkv.sinks.to(lse.dtype)[:, None] - lse)
        dsinks = -(weight * delta).sum(-1)
        grads = self.backward(dout, qkv, out, lse, spec)
        return grads, dsinks if qkv.bounds is not None else dsinks.sum(0)

    def pieces(self, qkv: QKV) -> list[QKV]:
        if qkv.bounds is None:
            self.calls.append(())
            return [QKV(*qkv.tensors)]
        ends = qkv.bounds.offsets.tolist()
        self.calls.append(tuple(ends))
        return [QKV(*(x[None, a:b] for x in qkv.tensors)) for a, b in pairwise(ends)]


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    kernel, choose = Standin(), local.choose

    def chosen(name: str, *given: Any, **named: Any) -> Any:
        return kernel if name == "standin" else choose(name, *given, **named)

    monkeypatch.setattr(local, "choose", chosen)
    return kernel


def attended(name: str, layout: SequenceLayout, sinks: Tensor | None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((6, 8), (3, 8), (3, 8), (6, 8))
    q, k, v, dout = (torch.randn(2, layout.padded, h, d, dtype=torch.float64, generator=draw) for h, d in shapes)
    here = LocalAttention(layout, SPEC, RUNS, name)
    out, lse = here.attend(QKV(q, k, v), sinks)
    grads, dsinks = here.attend_backward(dout, QKV(q, k, v), out, lse, sinks)
    return [out, *grads, *([] if dsinks is None else [dsinks])]


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("padding", ["zero", "masked"])
def test_one_call_with_sinks_equals_calls_without(
    standin: Standin, padding: Any, *, packed: bool, with_sinks: bool
) -> None:
    layout = SequenceLayout.packed(DOCUMENTS, 1, 100) if packed else SequenceLayout.whole_rows(2, 24, 1)
    layout = SequenceLayout(layout.length, layout.padded, 1, layout.documents, layout.max_position, padding)
    sinks = torch.linspace(-1, 1, 6, dtype=torch.float64) if with_sinks else None
    found = attended("standin", layout, sinks)
    for got, wanted in zip(found, attended("cpu", layout, sinks), strict=True):
        # Sinks are handed to a kernel in fp32.
        assert float((got - wanted).abs().max()) < (1e-6 if with_sinks else 1e-12)
    if packed:
        assert {calls for calls in standin.calls if calls} == {(0, 9, 10, 22), (0, 4, 24)}


def test_offsets_of_a_step_are_made_once(standin: Standin) -> None:
    layout = SequenceLayout.packed(DOCUMENTS, 1, 100)

    def offsets() -> dict[Any, int]:
        return {key: id(value) for key, value in local._LATEST.of(layout).items() if len(key) == 3}

    attended("standin", layout, None)
    made = offsets()
    assert len(made) == 2
    attended("standin", layout, None)
    assert offsets() == made
    other = SequenceLayout.whole_rows(2, 24, 1)
    attended("standin", other, None)
    assert offsets() == {}, "the offsets of another layout are not kept"
