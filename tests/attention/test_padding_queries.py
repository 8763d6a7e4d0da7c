"""Attention at padding against transformers' rules, written once more as a dense mask: outputs and every gradient, fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.attention import padding_queries
from ithaca.attention.kernels.interface import QKV, AttentionSpec
from ithaca.attention.local import LocalAttention
from ithaca.heads import HeadRange
from ithaca.sequence.layout import Padding, SequenceLayout
from tests.tolerances import FAULT, FP64

S, PADDED = 11, 12
ROWS = ((0, 11), (0, 6), (5, 11), (3, 8))
SPECS = {
    "causal": AttentionSpec(scale=0.4),
    "window": AttentionSpec(scale=0.4, window=3),
    "softcap": AttentionSpec(scale=0.4, softcap=0.7, window=4),
    "both ways": AttentionSpec(scale=0.4, causal=False, window=3),
}


def _layout(kind: Padding) -> SequenceLayout:
    return SequenceLayout(S, PADDED, 2, tuple((row,) for row in ROWS), S - 1, kind)


def _inputs() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(len(ROWS), PADDED, heads, 4) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def _dense(kind: Padding, spec: AttentionSpec) -> list[Tensor]:
    """One softmax over a mask of the whole batch, as transformers makes it; `finfo.min` is added under eager."""
    q, k, v, dout = _inputs()
    q, k, v = (x[:, :S].clone().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    n, m = torch.arange(S)[:, None], torch.arange(S)[None]
    seen = n >= m if spec.causal else torch.ones(S, S, dtype=torch.bool)
    seen = seen & ((n - m).abs() < (spec.window or S))
    seen = torch.stack([seen & (m >= start) & (m < end) for start, end in ROWS])[:, None]
    if kind == "averaged":
        hidden = torch.zeros(seen.shape, dtype=scores.dtype).masked_fill(~seen, torch.finfo(scores.dtype).min)
        weights = (scores + hidden).softmax(-1)
    else:
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)
    out = torch.einsum("bhnm,bmhe->bnhe", weights, values)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout[:, :S])]


def _local(kind: Padding, spec: AttentionSpec) -> list[Tensor]:
    q, k, v, dout = _inputs()
    # What stands after the batch's own length is nobody's, and no gradient comes from there.
    dout[:, S:] = 0
    local = LocalAttention(_layout(kind), spec, (HeadRange((0, 4), (0, 2)),), "cpu")
    out, lse = local.attend(QKV(q, k, v))
    return [x[:, :S] for x in (out, *local.attend_backward(dout, QKV(q, k, v), out, lse)[0])]


def _off(kind: Padding, spec: AttentionSpec) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(_local(kind, spec), _dense(kind, spec), strict=True))


@pytest.mark.parametrize("block", [512, 2])
@pytest.mark.parametrize("kind", ["masked", "averaged"])
@pytest.mark.parametrize("name", SPECS)
def test_padding_queries_equal_transformers(name: str, kind: Padding, block: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(padding_queries, "BLOCK", block)
    assert _off(kind, SPECS[name]) < FP64


def test_padding_queries_left_zero_are_detected() -> None:
    local = _local("zero", SPECS["causal"])
    assert (
        max(float((a - b).abs().max()) for a, b in zip(local, _dense("masked", SPECS["causal"]), strict=True)) > FAULT
    )


def test_padding_queries_of_packed_rows_stay_zero() -> None:
    q, k, v, _ = _inputs()
    layout = SequenceLayout(S, PADDED, 2, (((0, 4), (4, 9)),) * len(ROWS), S - 1, "masked")
    out, _ = LocalAttention(layout, SPECS["causal"], (HeadRange((0, 4), (0, 2)),), "cpu").attend(QKV(q, k, v))
    assert not out[:, 9:].any()
    assert out[:, :9].any()
