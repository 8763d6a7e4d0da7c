"""Splits of heads over ranks: no split has a smaller largest load, nor, at that load, fewer kv copies.

Brute force over all contiguous cuts stands beside the dynamic programme. `runs` must name the right kv head for
every query head, in groups a kernel can take: unequal groups are answered wrongly by the CPU kernel.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from ithaca.errors import MeshError
from ithaca.heads import HeadRange, HeadSplit, split_heads

NAMED = [(8, 8), (8, 2), (4, 1), (7, 7), (9, 3), (14, 2), (28, 4)]
SMALL = [(h, k) for h in range(1, 17) for k in range(1, h + 1) if h % k == 0]
EVERY = sorted({*NAMED, *SMALL})


def copies(cuts: tuple[int, ...], group: int) -> int:
    """Key-value heads sent when query heads are cut there, counted head by head."""
    return sum(len({q // group for q in range(start, end)}) for start, end in pairwise(cuts))


def fewest_copies(heads: int, group: int, sp: int, largest: int) -> int:
    every = ((0, *inner, heads) for inner in combinations(range(1, heads), sp - 1))
    return min(copies(cuts, group) for cuts in every if max(end - start for start, end in pairwise(cuts)) <= largest)


def sizes(split: HeadSplit) -> list[int]:
    return [end - start for start, end in split.q]


@pytest.mark.parametrize(("heads", "kv_heads"), EVERY, ids=str)
def test_split_is_contiguous_complete_and_balanced(heads: int, kv_heads: int) -> None:
    group = heads // kv_heads
    for sp in range(1, min(heads, 8) + 1):
        split = split_heads(heads, kv_heads, sp)
        assert [q for start, end in split.q for q in range(start, end)] == list(range(heads))
        assert min(sizes(split)) >= 1
        assert max(sizes(split)) == -(-heads // sp)
        for (start, end), (first, last) in zip(split.q, split.kv, strict=True):
            assert sorted({q // group for q in range(start, end)}) == list(range(first, last))
        assert split.kv_copies == copies((0, *(end for _, end in split.q)), group)


@pytest.mark.parametrize(("heads", "kv_heads"), [pair for pair in EVERY if pair[0] <= 14], ids=str)
def test_split_has_fewest_kv_copies(heads: int, kv_heads: int) -> None:
    for sp in range(1, min(heads, 8) + 1):
        split = split_heads(heads, kv_heads, sp)
        assert split.kv_copies == fewest_copies(heads, heads // kv_heads, sp, -(-heads // sp)), sp


@pytest.mark.parametrize(("heads", "kv_heads"), EVERY, ids=str)
def test_runs_have_equal_groups_and_right_kv_head(heads: int, kv_heads: int) -> None:
    group = heads // kv_heads
    for sp in range(1, min(heads, 8) + 1):
        split = split_heads(heads, kv_heads, sp)
        for rank in range(sp):
            runs = split.runs(rank)
            assert_runs(runs, split, rank, group)
            # No two neighbouring runs could have been one call.
            per_kv = [(run.q[1] - run.q[0]) // (run.kv[1] - run.kv[0]) for run in runs]
            assert all(a != b for a, b in pairwise(per_kv))


def assert_runs(runs: tuple[HeadRange, ...], split: HeadSplit, rank: int, group: int) -> None:
    """Heads are counted from the rank's first; a kernel gives query i of a run the kv head i // (q / kv)."""
    q_start, q_end = split.q[rank]
    assert [q for run in runs for q in range(*run.q)] == list(range(q_end - q_start))
    assert [kv for run in runs for kv in range(*run.kv)] == list(range(split.kv[rank][1] - split.kv[rank][0]))
    for run in runs:
        queries, kvs = run.q[1] - run.q[0], run.kv[1] - run.kv[0]
        assert queries % kvs == 0
        for i in range(queries):
            served_by = split.kv[rank][0] + run.kv[0] + i // (queries // kvs)
            assert served_by == (q_start + run.q[0] + i) // group


def test_runs_wrong_kv_head_is_detected() -> None:
    split = split_heads(9, 3, 2)
    rank = next(r for r in range(2) if len(split.runs(r)) > 1)
    merged = HeadRange((0, sizes(split)[rank]), (0, split.kv[rank][1] - split.kv[rank][0]))
    with pytest.raises(AssertionError):
        assert_runs((merged,), split, rank, 3)


def test_split_of_known_models_is_expected() -> None:
    llama = split_heads(28, 4, 8)
    assert sizes(llama) == [4, 3] * 4
    assert [end - start for start, end in llama.kv] == [1] * 8
    assert sizes(split_heads(8, 8, 4)) == [2] * 4
    assert split_heads(8, 2, 4).kv == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert split_heads(8, 2, 2).kv_copies == 2
    assert sizes(split_heads(7, 7, 4)) == [2, 2, 2, 1]
    assert split_heads(4, 1, 4).kv == ((0, 1),) * 4


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp", "message"),
    [
        (8, 3, 2, "8 query heads are not a multiple of 3 key-value heads"),
        (4, 4, 5, "4 heads over sp=5: every rank needs a head, use sp=4 or less"),
        (2, 4, 2, "2 query heads are not a multiple of 4 key-value heads"),
    ],
)
def test_split_impossible_heads_are_refused(heads: int, kv_heads: int, sp: int, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        split_heads(heads, kv_heads, sp)
