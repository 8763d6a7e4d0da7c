"""How long a row can be: of one cut and recipe, or of all that a machine allows, to a step of 1,024 tokens.

Invariant: a length is refused exactly if nothing here reaches it, and the longest is planned if it is asked for: both
ask `feasible` about the same places and recipes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ithaca.planning.memory_plan import UNDECIDED as FREE
from ithaca.planning.search.choose import feasible, nearest_miss
from ithaca.planning.search.meshes import Place, parts, whole
from ithaca.planning.search.request import Degrees, Recipe, Wanted, job_of, leanest, recipes
from ithaca.planning.terms.memory_terms import StepMemory

# Lengths are looked for in steps of this many tokens; where the search for the longest begins.
STEP, GUESS = 1024, 2**19
_ANY = FREE


class Longest(NamedTuple):
    """A length, and what it takes: the cut of the machine or of a part of it, and the most exact recipe that fits."""

    length: int
    place: Place
    recipe: Recipe


def fits(wanted: Wanted, length: int, degrees: Degrees, recipe: Recipe) -> bool:
    return feasible(wanted.sizes, _ANY, job_of(wanted, length, degrees, recipe)[0], *wanted.budgets)


def fits_any(wanted: Wanted, length: int) -> bool:
    """Whether anything fits that runs."""
    lean = leanest(wanted)
    return any(
        fits(*_at(place, length), recipe) for find in (whole, parts) for place in find(wanted) for recipe in lean
    )


def longest(wanted: Wanted, degrees: Degrees, recipe: Recipe, *, beyond: int = 0) -> int:
    """The longest length that fits this mesh, in steps of 1,024 tokens (below the first step, of one); 0 where none
    does, or none longer than `beyond`."""

    def works(tokens: int) -> bool:
        return fits(wanted, tokens, degrees, recipe)

    # By doubling to where it fits no more, and by halving back. Beyond a length that is known the steps begin small.
    known = beyond // STEP
    low, high = known + 1, known + 1 + known // 16 if known > 16 else GUESS // STEP + known
    if not works(low * STEP):
        return _below(STEP, works) if not known and works(1) else 0
    while works(high * STEP):
        low, high = high, high + 2 * (high - low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle * STEP) else (low, middle)
    return low * STEP


def _below(high: int, works: Callable[[int], bool]) -> int:
    """The longest below `high`, which does not work; one token does."""
    low = 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


@cache
def longest_of_all(wanted: Wanted) -> Longest | None:
    """The longest length that any plan fits, all numerics and parts of the machine allowed that a given length is.

    Kept: a plan of `--length max` asks for it, and what is said of its reach does so again.
    """
    best = longest_length(wanted)
    if not best:
        return None
    every = [recipe for group in recipes(wanted) for recipe in group]
    places = (find(wanted) for find in (whole, parts))
    found = (Longest(best, place, recipe) for some in places for recipe in every for place in some)
    return next(each for each in found if fits(*_at(each.place, best), each.recipe))


def longest_length(wanted: Wanted, *, known: int = 0) -> int:
    """The same without what it takes; `known` is a length that is reached anyway."""
    best = known
    for place in (*whole(wanted), *parts(wanted)):
        # On the host there is room for most: what is found there leaves little to look for on the device.
        for recipe in reversed(leanest(wanted)):
            best = max(best, longest(*place, recipe, beyond=best))
    return best


def _at(place: Place, length: int) -> tuple[Wanted, int, Degrees]:
    return place.wanted, length, place.degrees


def miss(wanted: Wanted, length: int) -> tuple[Place, Recipe, StepMemory] | None:
    """The nearest miss of the most exact numerics; None where no cut is possible at all."""
    place = next(iter(whole(wanted) or parts(wanted)), None)
    if place is None:
        return None
    device, host = place.wanted.budgets
    misses = []
    for recipe in next(recipes(wanted)):
        job, _ = job_of(*_at(place, length), recipe)
        misses.append((place, recipe, nearest_miss(wanted.sizes, job, host, _ANY)))
    return min(misses, key=lambda each: max(each[2].device_bytes / device, each[2].host_bytes / host))
