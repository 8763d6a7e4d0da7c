"""`SequenceLayout`: spans that are disjoint, in order and cover exactly the real tokens; shards that cover the row.

Every mask, position and label follows from these integers, so a wrong one here is a silent leak everywhere.
"""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch

from ithaca.errors import BatchError
from ithaca.sequence.layout import SequenceLayout, Span


def layout_of(*rows: list[int], shards: int = 2) -> SequenceLayout:
    return SequenceLayout.packed(torch.tensor(rows), shards, max(map(len, rows)) - 1)


@pytest.mark.parametrize(
    ("row", "spans"),
    [
        ([0, 0, 0, 0], ((0, 4),)),
        ([0, 0, 1, 1], ((0, 2), (2, 4))),
        ([5, 5, 2, 2], ((0, 2), (2, 4))),
        ([-1, -1, 0, 0], ((2, 4),)),
        ([0, 0, -1, -1], ((0, 2),)),
        ([-1, 0, 0, -1], ((1, 3),)),
        ([0, -1, 1, -1], ((0, 1), (2, 3))),
        ([-1, -1, -1, -1], ()),
        ([0, 1, 2, 3], ((0, 1), (1, 2), (2, 3), (3, 4))),
        ([-7, -1, 0, 0], ((2, 4),)),
    ],
)
def test_layout_packed_row_gives_spans(row: list[int], spans: tuple[Span, ...]) -> None:
    assert layout_of(row).documents == (spans,)


@pytest.mark.parametrize("row", [[0, -1, 0], [0, 1, 0], [3, 3, -1, 4, 3]])
def test_layout_document_with_hole_is_refused(row: list[int]) -> None:
    with pytest.raises(BatchError, match=rf"row 1: document {row[0]} is not in one piece .*left, right or between"):
        layout_of([9] * len(row), row)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 23])
def test_layout_pads_to_multiple_of_shards(length: int, shards: int) -> None:
    for layout in (SequenceLayout.whole_rows(2, length, shards), layout_of([0] * length, [0] * length, shards=shards)):
        assert layout.documents == (((0, length),),) * 2
        assert layout.padded % shards == 0
        assert length <= layout.padded < length + shards
        cut = [token for rank in range(shards) for token in range(layout.padded)[layout.shard(rank)]]
        assert cut == list(range(layout.padded))
        assert layout.shard_length * shards == layout.padded
        assert layout.max_position == length - 1


def test_layout_properties_of_packed_rows() -> None:
    layout = layout_of([-1, 0, 0, 1, 1, 1, 2], [-1] * 7, shards=3)
    assert (layout.batch, layout.length, layout.padded, layout.shard_length) == (2, 7, 9, 3)
    assert (layout.longest, layout.tokens, layout.uniform) == (3, 6, False)
    nothing = layout_of([-1, -1], [-1, -1])
    assert (nothing.longest, nothing.tokens, nothing.uniform) == (0, 0, True)
    assert layout_of([0, 0, 1], [4, 4, 5]).uniform
    assert not layout_of([0, 0, 1], [0, 1, 1]).uniform


def test_layout_is_frozen() -> None:
    layout = SequenceLayout.whole_rows(1, 4, 2)
    assert layout == layout_of([0, 0, 0, 0])
    assert hash(layout) == hash(layout_of([0, 0, 0, 0]))
    with pytest.raises(FrozenInstanceError):
        layout.length = 5  # type: ignore[misc]


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (1, 0)])
def test_layout_empty_batch_is_refused(batch: int, length: int) -> None:
    with pytest.raises(BatchError, match=f"{batch} rows of {length} tokens is empty: at least one token"):
        SequenceLayout.whole_rows(batch, length, 2)


def test_layout_random_rows_spans_cover_tokens() -> None:
    draw = random.Random(0)
    for _ in range(200):
        rows = [random_row(draw, length := draw.randint(1, 40)) for _ in range(draw.randint(1, 3))]
        rows = [(row + [-1] * 40)[:length] for row in rows]
        layout = layout_of(*rows, shards=draw.randint(1, 8))
        for row, spans in zip(rows, layout.documents, strict=True):
            assert all(a_end <= b_start for (_, a_end), (b_start, _) in pairwise(spans))
            covered = [token for start, end in spans for token in range(start, end)]
            assert covered == [token for token, number in enumerate(row) if number >= 0]
            assert all(len(set(row[start:end])) == 1 for start, end in spans)
            assert len({row[start] for start, _ in spans}) == len(spans)
        assert layout.tokens == sum(number >= 0 for row in rows for number in row)


def random_row(draw: random.Random, length: int) -> list[int]:
    """Documents of 1 to 9 tokens under shuffled numbers, padding before, between and after some of them."""
    row: list[int] = []
    for number in draw.sample(range(100), length):
        row += [-1] * draw.choice([0, 0, 0, 2]) + [number] * draw.randint(1, 9)
    return row[:length]
