"""The longest row that fits: of one mesh and recipe, or of all that a machine allows, in steps of 1,024 tokens.

Invariant: a length is refused exactly if no search here reaches it, and the longest is planned if it is asked for: both
ask `feasible` about the same meshes and recipes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ithaca.planning.memory_plan import UNDECIDED
from ithaca.planning.search.bisection import largest
from ithaca.planning.search.choose import feasible, nearest_miss
from ithaca.planning.search.meshes import SubMesh, meshes_of_all, meshes_of_parts
from ithaca.planning.search.request import MeshShape, PlanRequest, Recipe, job_of, leanest, recipes
from ithaca.planning.terms.step_memory import StepMemory

# Tokens from one length to the next; the length at which the search for the longest begins.
STEP, GUESS = 1024, 2**19


class Longest(NamedTuple):
    """A length, the mesh that it takes and the most exact recipe that fits."""

    length: int
    mesh: SubMesh
    recipe: Recipe


def fits(request: PlanRequest, length: int, degrees: MeshShape, recipe: Recipe) -> bool:
    """True if any plan for this length fits this mesh."""
    return feasible(request.sizes, UNDECIDED, job_of(request, length, degrees, recipe)[0], *request.budgets)


def fits_any(request: PlanRequest, length: int) -> bool:
    """True if the length fits any mesh of the machine, or of a part of it."""
    lean = leanest(request)
    return any(
        fits(mesh.request, length, mesh.degrees, recipe)
        for find in (meshes_of_all, meshes_of_parts)
        for mesh in find(request)
        for recipe in lean
    )


def longest(request: PlanRequest, degrees: MeshShape, recipe: Recipe, *, beyond: int = 0) -> int:
    """Return the longest length beyond `beyond` that fits this mesh; 0 if none does.

    Lengths are multiples of `STEP`; below the first of them, single tokens.
    """

    def works(tokens: int) -> bool:
        return fits(request, tokens, degrees, recipe)

    # Doubling steps find a length that does not fit, bisection the longest before it. Beyond a known length little is to be
    # expected, so the steps begin small.
    known = beyond // STEP
    low, high = known + 1, known + 1 + known // 16 if known > 16 else GUESS // STEP + known
    if not works(low * STEP):
        return (largest(1, STEP - 1, works) or 0) if not known else 0
    while works(high * STEP):
        low, high = high, high + 2 * (high - low)
    return (largest(low + 1, high - 1, lambda steps: works(steps * STEP)) or low) * STEP


@cache
def longest_of_all(request: PlanRequest) -> Longest | None:
    """Return the longest length that any plan fits, on the meshes and with the numerics that a given length may have."""
    # Kept: a plan of `--length max` asks for the longest, and so does the list of lengths within reach.
    best = longest_length(request)
    if not best:
        return None
    every = [recipe for group in recipes(request) for recipe in group]
    meshes = (find(request) for find in (meshes_of_all, meshes_of_parts))
    found = (Longest(best, mesh, recipe) for some in meshes for recipe in every for mesh in some)
    return next(each for each in found if fits(each.mesh.request, best, each.mesh.degrees, each.recipe))


def longest_length(request: PlanRequest, *, known: int = 0) -> int:
    """Return the longest length that any plan fits; `known` is a length that is known to fit."""
    best = known
    for mesh in (*meshes_of_all(request), *meshes_of_parts(request)):
        # With state on the host a device takes the longest rows: little is left to find with state on the device.
        for recipe in reversed(leanest(request)):
            best = max(best, longest(*mesh, recipe, beyond=best))
    return best


def miss(request: PlanRequest, length: int) -> tuple[SubMesh, Recipe, StepMemory] | None:
    """Return the nearest miss with the most exact numerics; None if no mesh is possible."""
    mesh = next(iter(meshes_of_all(request) or meshes_of_parts(request)), None)
    if mesh is None:
        return None
    device, host = mesh.request.budgets
    misses = []
    for recipe in next(recipes(request)):
        job, _ = job_of(mesh.request, length, mesh.degrees, recipe)
        misses.append((mesh, recipe, nearest_miss(request.sizes, job, host, UNDECIDED)))
    return min(misses, key=lambda each: max(each[2].device_bytes / device, each[2].host_bytes / host))
