"""The exchange against gathering everything and slicing: every element, exactly, even and uneven, any dtype.

Also what it costs: one collective each way, and on the wire no byte more than the heads need. A kv head that went to
several ranks comes back summed in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.exchange import TensorColumns, start_to_heads, start_to_tokens
from ithaca.attention.ulysses import ulysses_attention
from ithaca.heads import HeadSplit, split_heads
from ithaca.mesh import init_mesh
from ithaca.sequence.layout import SequenceLayout
from tests.ranks import RankError, run_ranks

LENGTH = 3
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "recv", "isend", "irecv",
)  # fmt: skip


@dataclass
class Wire:
    """Bytes that this rank sent to others, and the number of its collectives."""

    collectives: int = 0
    sent: int = 0


@contextmanager
def watched() -> Iterator[Wire]:
    wire = Wire()
    exchange = dist.all_to_all_single

    def counted(output: Tensor, tensor: Tensor, out_sizes: list[int], in_sizes: list[int], **kwargs: Any) -> Any:
        wire.collectives += 1
        me = dist.get_rank(kwargs["group"])
        wire.sent += (sum(in_sizes) - in_sizes[me]) * tensor.itemsize
        return exchange(output, tensor, out_sizes, in_sizes, **kwargs)

    def another(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective beside the all-to-alls")

    with patch.multiple(dist, **dict.fromkeys(COLLECTIVES, another) | {"all_to_all_single": counted}):
        yield wire


def columns_of(split: HeadSplit, key: int, value: int) -> list[TensorColumns]:
    """q, k, v: three head sizes and counts in one collective."""
    return [
        TensorColumns(split.q, split.heads, key),
        TensorColumns(split.kv, split.kv_heads, key),
        TensorColumns(split.kv, split.kv_heads, value),
    ]


def whole(columns: TensorColumns, tokens: int, batch: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return equal numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, columns.heads, columns.size, generator=generator, dtype=torch.float64).to(dtype)


def shard(x_BSHD: Tensor, rank: int, *, strided: bool) -> Tensor:
    piece = x_BSHD[:, rank * LENGTH : (rank + 1) * LENGTH]
    # As transformers hands them over: [B, H, L, D] in memory, seen as [B, L, H, D].
    return piece.transpose(1, 2).contiguous().transpose(1, 2) if strided else piece.contiguous()


def to_heads(tensors: list[Tensor], all_columns: list[TensorColumns]) -> list[Tensor]:
    return start_to_heads(tensors, all_columns, dist.group.WORLD).wait()


def to_tokens(tensors: list[Tensor], all_columns: list[TensorColumns], wide: torch.dtype | None = None) -> list[Tensor]:
    """Into new tensors: heads that several ranks bring are added up in fp32, or in `wide`."""
    (batch, total), dtype = tensors[0].shape[:2], tensors[0].dtype
    wide = wide or torch.promote_types(dtype, torch.float32)
    shared = [sum(end - start for start, end in columns.ranges) > columns.heads for columns in all_columns]
    into = [
        torch.zeros(batch, total // dist.get_world_size(), columns.heads, columns.size, dtype=wide if add else dtype)
        for columns, add in zip(all_columns, shared, strict=True)
    ]
    return [x.to(dtype) for x in start_to_tokens(tensors, all_columns, dist.group.WORLD, into, shared).wait()]


def check_to_heads(heads: int, kv_heads: int, batch: int, dtype: torch.dtype, strided: bool) -> None:
    ranks, me = dist.get_world_size(), dist.get_rank()
    all_columns = columns_of(split_heads(heads, kv_heads, ranks), 4, 6)
    wholes = [whole(columns, ranks * LENGTH, batch, dtype, seed) for seed, columns in enumerate(all_columns)]
    shards = [shard(x, me, strided=strided) for x in wholes]
    with watched() as wire:
        received = to_heads(shards, all_columns)
    assert wire.collectives == 1
    for x_BSHD, columns, got in zip(wholes, all_columns, received, strict=True):
        start, end = columns.ranges[me]
        assert torch.equal(got, x_BSHD[:, :, start:end])
    # And back: what covers every head once is the shard again; copies of kv heads count as often as they were sent.
    with watched() as wire:
        back = to_tokens(received, all_columns)
    assert wire.collectives == 1
    for x, columns, got in zip(shards, all_columns, back, strict=True):
        times = torch.zeros(columns.heads)
        for start, end in columns.ranges:
            times[start:end] += 1
        exact = torch.promote_types(dtype, torch.float32)
        assert got.dtype == dtype
        assert torch.equal(got, (x.to(exact) * times[:, None].to(exact)).to(dtype))


def check_to_tokens(heads: int, kv_heads: int, batch: int, dtype: torch.dtype, strided: bool) -> None:
    """Compare sums over copies: every rank sends other numbers."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    all_columns = columns_of(split_heads(heads, kv_heads, ranks), 4, 6)
    exact = torch.promote_types(dtype, torch.float32)
    mine, expected = [], []
    for number, columns in enumerate(all_columns):
        total = torch.zeros(batch, ranks * LENGTH, columns.heads, columns.size, dtype=exact)
        for rank, (start, end) in enumerate(columns.ranges):
            x = whole(columns, ranks * LENGTH, batch, dtype, 100 * number + rank)[:, :, start:end]
            total[:, :, start:end] += x.to(exact)
            if rank == me:
                mine.append(x.transpose(1, 2).contiguous().transpose(1, 2) if strided else x.contiguous())
        expected.append(shard(total, me, strided=False).to(dtype))
    for got, wanted in zip(to_tokens(mine, all_columns), expected, strict=True):
        assert torch.equal(got, wanted)
    # The output's way back: one tensor, also as the kernel lays it out, token by token.
    lone = mine[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(to_tokens([lone], all_columns[:1])[0], expected[0])


def check_all(cases: list[tuple[int, int]]) -> int:
    done = 0
    for heads, kv_heads in cases:
        for batch, strided in ((1, False), (3, True)):
            for dtype in (torch.bfloat16, torch.float32, torch.float64):
                check_to_heads(heads, kv_heads, batch, dtype, strided)
                check_to_tokens(heads, kv_heads, batch, dtype, strided)
                done += 1
    return done


HEADS = [(12, 12), (8, 2), (4, 1), (7, 7), (9, 3), (14, 2)]


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_exchange_on_several_ranks_equals_gather_and_slice(world: int) -> None:
    assert run_ranks(world, check_all, HEADS) == [len(HEADS) * 6] * world


def sum_in_bf16() -> None:
    """The fault: copies meet in the tensor's own dtype."""
    columns = TensorColumns(((0, 1),) * dist.get_world_size(), 1, 64)
    parts = [whole(columns, dist.get_world_size() * LENGTH, 1, torch.bfloat16, r) for r in range(dist.get_world_size())]
    mine = parts[dist.get_rank()]
    (got,) = to_tokens([mine], [columns], wide=torch.bfloat16)
    total = shard(sum(part.float() for part in parts), dist.get_rank(), strided=False)  # type: ignore[arg-type]
    (right,) = to_tokens([mine], [columns])
    assert torch.equal(right, total.to(torch.bfloat16)), "summed in fp32"
    assert not torch.equal(got, total.to(torch.bfloat16)), "the fault went unseen"


@pytest.mark.slow
def test_kv_gradients_of_several_ranks_are_summed_in_fp32() -> None:
    run_ranks(4, sum_in_bf16)


def swapped_ranges() -> None:
    """The fault: two ranks' heads the wrong way round on the way out."""
    columns = TensorColumns(((0, 2), (2, 4)), 4, 4)
    wrong = TensorColumns(((2, 4), (0, 2)), 4, 4)
    x = whole(columns, 2 * LENGTH, 1, torch.float64, 0)
    (got,) = to_heads([shard(x, dist.get_rank(), strided=False)], [wrong])
    start, end = columns.ranges[dist.get_rank()]
    assert torch.equal(got, x[:, :, start:end])


def test_exchange_wrong_split_is_detected() -> None:
    with pytest.raises(RankError, match="AssertionError"):
        run_ranks(2, swapped_ranges)


def measure(heads: int, kv_heads: int, batch: int, length: int, sp: int) -> list[tuple[int, int]]:
    """(collectives, bytes) of forward and of backward, D = 4 and E = 6, in fp32."""
    mesh = init_mesh(sp=sp)
    shapes = [(heads, 4), (kv_heads, 4), (kv_heads, 6)]
    q, k, v = (torch.randn(batch, length, n, d, requires_grad=True) for n, d in shapes)
    layout = SequenceLayout.whole_rows(batch, length * sp, sp)
    with watched() as forward:
        out = ulysses_attention(q, k, v, mesh, layout)
    with watched() as backward:
        out.sum().backward()
    assert out.shape == (batch, length, heads, 6)
    return [(forward.collectives, forward.sent), (backward.collectives, backward.sent)]


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads"), [(2, 8, 8), (2, 7, 7), (3, 9, 3), (3, 14, 2), (4, 8, 2), (4, 4, 1), (4, 14, 2)]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_exchange_sends_expected_bytes(world: int, heads: int, kv_heads: int, batch: int) -> None:
    split, length = split_heads(heads, kv_heads, world), 5
    h, k = ([end - start for start, end in ranges] for ranges in (split.q, split.kv))
    for me, (forward, backward) in enumerate(run_ranks(world, measure, heads, kv_heads, batch, length, world)):
        others = [rank for rank in range(world) if rank != me]
        theirs, elsewhere = length * batch, (world - 1) * length * batch
        out_and_back = [
            theirs * sum(h[r] * 4 + k[r] * (4 + 6) for r in others) + elsewhere * h[me] * 6,
            theirs * sum(h[r] * 6 for r in others) + elsewhere * (h[me] * 4 + k[me] * (4 + 6)),
        ]
        assert forward == (2, 4 * out_and_back[0])
        assert backward == (2, 4 * out_and_back[1])


def test_exchange_on_one_rank_sends_nothing() -> None:
    assert run_ranks(2, measure, 8, 2, 2, 6, 1) == [[(0, 0), (0, 0)]] * 2
