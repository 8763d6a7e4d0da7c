"""Pairwise covers: few cases of a product in which every two values that may meet do meet.

    cover(["a", "b"], [1, 2, 3], ["x", "y"])      6 cases instead of 12

Most faults need one value or two to show, so a product of three and more lists repeats itself. A cover is a list of
tuples in the order of the product, the same on every machine, so pytest processes collect the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

Case = tuple[Any, ...]
Pair = tuple[int, int, int, int]


def cover(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *case: True) -> list[Case]:
    """Return cases of the product of `axes` that hold every pair of values of two axes.

    `allowed` takes a case's values: a pair is covered where some allowed case has it.
    """
    cases = [case for case in product(*map(range, map(len, axes))) if allowed(*_values(axes, case))]
    pairs = {case: _pairs(case) for case in cases}
    missing = set().union(*pairs.values())
    chosen: set[tuple[int, ...]] = set()
    while missing:
        # `max` takes the first of equals, which keeps the choice deterministic.
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [_values(axes, case) for case in cases if case in chosen]


def dealt(first: Iterable[Any], second: Sequence[Any], each: int = 1) -> list[Case]:
    """Return every value of `first` with `each` values of `second`, dealt in turn so that all of `second` come up."""
    hand = 0
    cases: list[Case] = []
    for value in first:
        cases += [(value, second[(hand + step) % len(second)]) for step in range(each)]
        hand += each
    return cases


def _values(axes: Sequence[Sequence[Any]], case: Iterable[int]) -> Case:
    return tuple(axis[index] for axis, index in zip(axes, case, strict=True))


def _pairs(case: Sequence[int]) -> set[Pair]:
    """Return the pairs of a case as (axis, index, axis, index)."""
    return {(a, case[a], b, case[b]) for a, b in combinations(range(len(case)), 2)}
