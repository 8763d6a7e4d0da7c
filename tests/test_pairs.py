"""Pairwise covers: every pair is there, no case is there that may not be, and few are there."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from tests.pairs import cover, dealt


def pairs_of(cases: list[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    return {(a, case[a], b, case[b]) for case in cases for a, b in combinations(range(len(case)), 2)}


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (2, 3, 2), (7, 7, 9, 2), (6, 5, 2, 2, 2)], ids=str)
def test_cover_of_a_product_has_every_pair(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}{index}" for index in range(size)] for axis, size in enumerate(sizes)]
    cases = cover(*axes)
    assert pairs_of(cases) == pairs_of(list(product(*axes)))
    assert len(set(cases)) == len(cases)
    largest, second = sorted(sizes)[-2:]
    assert largest * second <= len(cases) <= 1.4 * largest * second


def test_cover_with_a_rule_has_only_allowed_cases() -> None:
    def allowed(ranks: int, heads: int, kind: str) -> bool:
        return ranks <= heads

    axes = ((1, 2, 8), (4, 8), ("a", "b"))
    cases = cover(*axes, allowed=allowed)
    assert all(allowed(*case) for case in cases)
    assert pairs_of(cases) == pairs_of([case for case in product(*axes) if allowed(*case)])


def test_cover_made_twice_is_the_same() -> None:
    axes = (range(5), range(4), range(3))
    assert cover(*axes) == cover(*axes) == sorted(cover(*axes))


def test_cover_of_values_that_are_equal_keeps_them_apart() -> None:
    assert len(cover([{}, {}], [1])) == 2


def test_dealt_values_come_up_in_turn() -> None:
    assert dealt("abc", [1, 2]) == [("a", 1), ("b", 2), ("c", 1)]
    assert {second for _, second in dealt("abc", [1, 2, 3, 4, 5], each=2)} == {1, 2, 3, 4, 5}
