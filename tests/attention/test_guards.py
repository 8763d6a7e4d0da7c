"""Guards of size: larger calls are cut and stay exact, and a kernel is not given more keys than queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ithaca.attention.kernels import KERNELS, choose
from ithaca.attention.kernels.cpu import CpuKernel
from ithaca.attention.kernels.interface import INT32_ELEMENTS, QKV, AttentionSpec
from ithaca.attention.local import KernelCall, LocalAttention, within_limit
from ithaca.errors import UnsupportedError
from ithaca.heads import HeadRange
from ithaca.sequence.layout import SequenceLayout

SPEC = AttentionSpec(0.2)
ROWS, LENGTH, SIZE = 3, 40, 32
# Elements of one row's query heads of one kv head.
PART = LENGTH * 2 * SIZE
WHOLE = KernelCall(slice(None), (0, LENGTH))


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(ROWS, LENGTH, heads, SIZE, dtype=torch.float64, generator=draw) for heads in (6, 3, 3, 6)
    )
    return q, k, v, dout


def sizes(call: KernelCall, run: HeadRange) -> tuple[int, int]:
    return len(range(ROWS)[call.rows]), run.q[1] - run.q[0]


@pytest.mark.parametrize(
    ("most", "parts"),
    [
        (9 * PART, [(3, 6)]),
        (9 * PART - 1, [(2, 6), (1, 6)]),
        (6 * PART, [(2, 6), (1, 6)]),
        (3 * PART, [(1, 6)] * 3),
        (3 * PART - 1, [(1, 4), (1, 2)] * 3),
        (PART, [(1, 2)] * 9),
        (PART - 1, [(1, 1)] * 18),
        (1, [(1, 1)] * 18),
    ],
    ids=str,
)
def test_call_is_cut_by_rows_then_by_heads(most: int, parts: list[tuple[int, int]]) -> None:
    q, k, v, _ = tensors()
    found = list(within_limit(WHOLE, HeadRange((0, 6), (0, 3)), QKV(q, k, v), most))
    assert [sizes(call, run) for call, run in found] == parts
    # Every head of every row once.
    covered = torch.zeros(ROWS, 6)
    for call, run in found:
        assert [head // 2 for head in range(*run.q)] == sorted([*range(*run.kv)] * (2 if most >= PART else 1))
        covered[call.rows, slice(*run.q)] += 1
    assert bool((covered == 1).all())


@pytest.mark.parametrize("most", [6 * PART, 2 * PART, PART, PART // 2])
@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_cut_calls_give_the_numbers_of_whole_ones(
    monkeypatch: pytest.MonkeyPatch, most: int, *, documents: bool, sinks: bool
) -> None:
    q, k, v, dout = tensors()
    layout = SequenceLayout.whole_rows(ROWS, LENGTH, 1)
    if documents:
        layout = SequenceLayout.packed(torch.tensor([[0] * 25 + [1] * 15]).expand(ROWS, -1), 1, 100)
    local = LocalAttention(layout, SPEC, (HeadRange((0, 2), (0, 1)), HeadRange((2, 6), (1, 3))), "cpu")
    scores = torch.linspace(-1, 1, 6, dtype=torch.float64) if sinks else None

    def run() -> list[Tensor]:
        out, lse = local.attend(QKV(q, k, v), scores)
        grads, dsinks = local.attend_backward(dout, QKV(q, k, v), out, lse, scores)
        return [out, lse, *grads, *([] if dsinks is None else [dsinks])]

    whole = run()
    calls = []
    forward = CpuKernel.forward
    monkeypatch.setattr(CpuKernel, "most_elements", most)
    monkeypatch.setattr(CpuKernel, "forward", lambda *given: calls.append(given[1].q.numel()) or forward(*given))
    cut = run()
    assert max(calls) <= most
    assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(whole, cut, strict=True))


def test_kernel_given_more_than_it_takes_stops() -> None:
    q, k, v, _ = tensors()
    kernel = CpuKernel()
    kernel.most_elements = q.numel() - 1  # type: ignore[misc]
    with pytest.raises(AssertionError, match="cut the call by rows or heads"):
        kernel.forward(QKV(q, k, v), SPEC)


def test_one_head_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, v, _ = tensors()
    monkeypatch.setattr(CpuKernel, "most_elements", LENGTH * SIZE - 1)
    with pytest.raises(UnsupportedError, match="it takes at most 1,279 elements, and one head of 40 tokens has more"):
        choose("cpu", q, v, SPEC)


def test_only_what_was_run_takes_more_than_32_bits_count() -> None:
    assert {name for name, kernel in KERNELS.items() if kernel.most_elements > INT32_ELEMENTS} == {"flash_attn_4"}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (LENGTH + 9, "it takes as many keys as queries, got 40 queries and 49 keys"),
        (LENGTH - 9, "it takes as many keys as queries, got 40 queries and 31 keys"),
    ],
)
@pytest.mark.parametrize("name", ["cpu", "auto", "blockwise"])
def test_other_numbers_of_keys_are_refused_where_the_first_ones_are_aligned(name: str, keys: int, reason: str) -> None:
    q, _, v, _ = tensors()
    v = torch.randn(ROWS, keys, 3, SIZE, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=reason):
        choose(name, q, v, SPEC)
    # The kernel that takes more keys takes no fewer.
    said = str(KERNELS["flash_attn_4"].why_not(q, v, SPEC))
    assert ("every query needs a key" in said) == (keys < LENGTH)
