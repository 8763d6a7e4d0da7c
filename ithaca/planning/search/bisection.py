"""Binary search over whole numbers: the smallest that works, or the largest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable


def smallest(low: int, high: int, works: Callable[[int], bool]) -> int | None:
    """Return the smallest number from `low` to `high` that works, where every larger one works too; None if none does."""
    number = low + bisect_left(range(low, high + 1), True, key=works)
    return number if number <= high else None


def largest(low: int, high: int, works: Callable[[int], bool]) -> int | None:
    """Return the largest number from `low` to `high` that works, where every smaller one works too; None if none does."""
    number = low + bisect_left(range(low, high + 1), True, key=lambda n: not works(n)) - 1
    return number if number >= low else None
