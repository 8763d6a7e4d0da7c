"""Tests of row plans: every token once an epoch, any row by its number, as tight as best fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ithaca.data.rows.packing import DocumentSlice, PackedRows, RowKind, RowPlan, best_fit, pieces_between, plan_rows
from ithaca.data.rows.shuffle import shuffle
from ithaca.errors import DataError
from tests.counted import calls_of

KINDS: tuple[RowKind, ...] = ("packed", "joined")


def faults(rows: Sequence[Sequence[DocumentSlice]], lengths: np.ndarray, length: int) -> list[str]:
    """Return the faults of an epoch's rows: a row that is too long, a token that is not in exactly one row."""
    firsts = np.cumsum(lengths) - lengths
    seen = np.zeros(int(lengths.sum()), int)
    found = []
    for number, row in enumerate(rows):
        if sum(piece.count for piece in row) > length:
            found.append(f"row {number} is too long")
        for piece in row:
            if piece.count < 1 or piece.start + piece.count > lengths[piece.document]:
                found.append(f"row {number} reaches beyond document {piece.document}")
            begin = firsts[piece.document] + piece.start
            seen[begin : begin + piece.count] += 1
    if (seen != 1).any():
        found.append(f"{(seen == 0).sum()} tokens left out, {(seen > 1).sum()} repeated")
    return found


def epoch_rows(plan: RowPlan, epoch: int) -> list[list[DocumentSlice]]:
    count = plan.rows_per_epoch
    return [plan.pieces(row) for row in range(epoch * count, (epoch + 1) * count)]


def random_lengths(seed: int, count: int, most: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most, count)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("count", "most", "length"), [(1, 2, 1), (1, 50, 8), (200, 40, 64), (300, 900, 128), (50, 3, 1)]
)
def test_token_is_in_exactly_one_row_of_an_epoch(kind: RowKind, count: int, most: int, length: int) -> None:
    lengths = random_lengths(count, count, most) + (count == 1)
    plan = plan_rows(lengths, length, kind, seed=3)
    for epoch in (0, 1, 4):
        rows = epoch_rows(plan, epoch)
        assert faults(rows, lengths, length) == []
        assert sum(piece.count for row in rows for piece in row) / (len(rows) * length) == pytest.approx(
            plan.packing_efficiency
        )


def test_planted_fault_in_a_plan_is_seen() -> None:
    lengths = random_lengths(0, 100, 40) + 1
    rows = epoch_rows(plan_rows(lengths, 64, "packed", seed=0), 0)
    assert faults(rows[1:], lengths, 64)
    assert faults([*rows, rows[0]], lengths, 64)
    assert faults([rows[0] + rows[1], *rows[2:]], lengths, 64)
    moved = DocumentSlice(rows[0][0].document, 1, rows[0][0].count)
    assert faults([[moved, *rows[0][1:]], *rows[1:]], lengths, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_row_is_found_without_the_rows_before(kind: RowKind) -> None:
    lengths = random_lengths(1, 300, 90) + 1
    plan = plan_rows(lengths, 128, kind, seed=5)
    straight = [plan.pieces(row) for row in range(3 * plan.rows_per_epoch)]
    for row in (2 * plan.rows_per_epoch + 1, 0, plan.rows_per_epoch, 7):
        assert plan_rows(lengths, 128, kind, seed=5).pieces(row) == straight[row]
        assert plan.pieces(row) == straight[row]


@pytest.mark.parametrize("kind", KINDS)
def test_other_epoch_or_seed_changes_the_order(kind: RowKind) -> None:
    lengths = random_lengths(2, 300, 90) + 1
    plan = plan_rows(lengths, 128, kind, seed=5)
    first, second = epoch_rows(plan, 0), epoch_rows(plan, 1)
    other = epoch_rows(plan_rows(lengths, 128, kind, seed=6), 0)
    assert first != second
    assert first != other
    # Not the same rows in another order either: who shares a row changes.
    together = [{frozenset(piece.document for piece in row) for row in rows} for rows in (first, second)]
    assert together[0] != together[1]


def test_long_document_is_cut_into_pieces() -> None:
    plan = plan_rows(np.array([10, 3]), 4, "packed", seed=0)
    pieces = sorted((piece for row in epoch_rows(plan, 0) for piece in row), key=lambda p: (p.document, p.start))
    assert pieces == [DocumentSlice(0, 0, 4), DocumentSlice(0, 4, 4), DocumentSlice(0, 8, 2), DocumentSlice(1, 0, 3)]


def naive_best_fit(sizes: Sequence[int], length: int) -> list[int]:
    """Best fit as the books write it: the fullest row that has room, else a new one. Gives the rows' final room."""
    room: list[int] = []
    for size in sizes:
        fitting = [place for place, free in enumerate(room) if free >= size]
        if fitting:
            room[min(fitting, key=lambda place: room[place])] -= size
        else:
            room.append(length - size)
    return sorted(room)


@pytest.mark.parametrize(("length", "most"), [(64, 64), (100, 30), (1000, 900), (5000, 3000)])
def test_best_fit_equals_the_plain_algorithm(length: int, most: int) -> None:
    sizes = np.sort(np.random.default_rng(length).integers(1, most + 1, 400))[::-1]
    rows = best_fit(sizes, length)
    assert sorted((length - np.bincount(rows, sizes).astype(int)).tolist()) == naive_best_fit(sizes.tolist(), length)


def test_plan_rows_million_documents_makes_fewer_calls_than_documents() -> None:
    """Most is done by whole arrays: a call or more for each document would take minutes."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(7, 1.2, 1_000_000).astype(np.int64) + 1, 1_000_000)
    plans = []

    def planned() -> None:
        plans.append(plan_rows(lengths, 65_536, "packed", seed=0))
        plans[0].pieces(plans[0].rows_per_epoch // 2)

    assert calls_of(planned) < len(lengths) // 2
    assert plans[0].packing_efficiency > 0.999


def test_shuffle_is_a_permutation_of_its_key() -> None:
    assert sorted(shuffle(100, 1, 2).tolist()) == list(range(100))
    assert shuffle(100, 1, 2).tolist() == shuffle(100, 1, 2).tolist()
    assert shuffle(100, 1, 2).tolist() != shuffle(100, 1, 3).tolist()
    # The order of rows outlives versions: a run resumed years later goes on with the same ones.
    assert shuffle(10, 0, 0, 0).tolist() == [0, 7, 4, 9, 2, 1, 6, 8, 5, 3]


def test_pieces_between_skips_empty_documents() -> None:
    assert pieces_between(np.cumsum([2, 0, 3]), 1, 4) == [DocumentSlice(0, 1, 1), DocumentSlice(2, 0, 2)]


def test_documents_without_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="all documents are empty"):
        plan_rows(np.zeros(3, np.int64), 8, "packed", seed=0)


def test_shapes_of_rows_are_equal_in_every_epoch() -> None:
    lengths = random_lengths(3, 500, 90) + 1
    plan = PackedRows(lengths, 128, seed=1)
    shapes = [
        sorted(tuple(sorted(piece.count for piece in row)) for row in epoch_rows(plan, epoch)) for epoch in (0, 1)
    ]
    assert shapes[0] == shapes[1]
