"""The best mesh for a job: every cut of the GPUs into dp x ring x sp, each with its own plan of memory and its time.

Numerics come first: AdamW over fp32 weights is taken wherever it fits, on the device or on the host; an optimizer with
less state only where that fits nowhere. Within them the most tokens a second win, and of equals the fewest rows: states
on the host make room on the device, so where layers would be run again there, both places are looked at.
GPUs are left idle only where no plan over all of them fits.

Invariant: what is chosen runs. Ring attention is not built yet, so a ring is looked at for comparison only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ithaca.planning.memory_plan import Job, MemoryPlan
from ithaca.planning.search.choose import FREE, cheapest
from ithaca.planning.search.longest import longest
from ithaca.planning.search.meshes import Place, all_degrees, parts, whole
from ithaca.planning.search.request import Degrees, Recipe, Wanted, job_of, recipes
from ithaca.planning.terms.memory_terms import Memory, memory_of
from ithaca.planning.terms.step_time import StepTime, step_time
from ithaca.planning.terms.traffic import Machine

# Speeds that differ by less than this are taken for equal.
AS_FAST = 0.01
# States go to the host for no less than this: how fast it steps hangs on what else its memory has to do.
HOST_GAIN = 0.05
_ANY = FREE


@dataclass(frozen=True, slots=True)
class Option:
    """A mesh with everything that follows from it; `machine` is what it uses, all that there is or a part of it."""

    machine: Machine
    degrees: Degrees
    recipe: Recipe
    rows: int
    job: Job
    plan: MemoryPlan
    memory: Memory
    time: StepTime

    @property
    def runnable(self) -> bool:
        return self.degrees.ring == 1


def best_options(wanted: Wanted, length: int) -> list[Option]:
    """What runs and fits, the most tokens a second first; all of the same numerics, the first that fit any mesh."""
    for find in (whole, parts):
        places = find(wanted)
        for group in recipes(wanted):
            found: list[Option] = []
            for recipe in group:
                found += _of_recipe(wanted, length, recipe, places)
                if found and not _runs_again(_ranked(found)[0]):
                    break
            if found:
                return _ranked(found)
    return []


def _of_recipe(wanted: Wanted, length: int, recipe: Recipe, places: list[Place]) -> list[Option]:
    """What fits with one recipe."""
    found = [option for place in places for option in _options(*_at(place, length), recipe)]
    used = {option.machine for option in found}
    others = [place for place in _other_cuts(wanted, places) if place.wanted.machine in used]
    return [*found, *(each for place in others for each in _options(*_at(place, length), recipe))]


def _runs_again(option: Option) -> bool:
    return any(mode in ("rebuild", "recompute") for mode in option.plan.layers)


def _other_cuts(wanted: Wanted, places: list[Place]) -> Iterator[Place]:
    """Of a part the cut that reaches furthest is known; others may be faster where they fit as well."""
    for machine in dict.fromkeys(place.wanted.machine for place in places):
        part = replace(wanted, machine=machine)
        known = {place.degrees for place in places if place.wanted.machine == machine}
        yield from (Place(part, degrees) for degrees in all_degrees(part) if degrees not in known)


def _at(place: Place, length: int) -> tuple[Wanted, int, Degrees]:
    return place.wanted, length, place.degrees


def _ranked(options: list[Option]) -> list[Option]:
    """The fastest first; of those that are as fast as a prediction can tell, the one with the fewest rows a step."""
    options = sorted(options, key=_speed, reverse=True)
    least = (1 - AS_FAST) * _speed(options[0])
    level = [option for option in options if _speed(option) >= least]
    level.sort(key=lambda option: option.degrees.dp)
    return level + options[len(level) :]


def _speed(option: Option) -> float:
    return option.time.tokens_per_second * (1 - HOST_GAIN if option.recipe.on_host else 1)


def _options(wanted: Wanted, length: int, degrees: Degrees, recipe: Recipe) -> Iterator[Option]:
    job, rows = job_of(wanted, length, degrees, recipe)
    nodes = wanted.machine.nodes
    # A copy of the weights in each node keeps gathers off the network, where there is room for it.
    for replicas in (1, nodes) if nodes > 1 else (1,):
        copied = replace(job, replicas=replicas)
        plan = cheapest(wanted.sizes, copied, *wanted.budgets, _ANY)
        if plan is None:
            # More copies only take more.
            return
        memory = memory_of(wanted.sizes, copied, plan)
        time = step_time(wanted.sizes, copied, plan, wanted.machine, rows=rows)
        yield Option(wanted.machine, degrees, recipe, rows, copied, plan, memory, time)


def option_of(wanted: Wanted, length: int, degrees: Degrees, recipe: Recipe) -> Option | None:
    """One mesh, runnable or not; the faster of its copies of the weights."""
    return max(
        _options(wanted, length, degrees, recipe), key=lambda option: option.time.tokens_per_second, default=None
    )


class Compared(NamedTuple):
    """One cut beside the chosen one: how long a row it takes, and what it is at the length asked for, if it fits."""

    degrees: Degrees
    longest: int
    option: Option | None
    chosen: bool


def compare(wanted: Wanted, chosen: Option) -> list[Compared]:
    """Every cut of the GPUs that the chosen one uses, with its numerics, rings among them."""
    used, length = replace(wanted, machine=chosen.machine), chosen.job.length
    rows = []
    for degrees in all_degrees(used, rings=True):
        mine = degrees == chosen.degrees
        option = chosen if mine else option_of(used, length, degrees, chosen.recipe)
        reach = longest_so_cut(used, chosen.recipe, degrees, length if option is not None else 0)
        rows.append(Compared(degrees, reach, option, mine))
    return rows


def longest_so_cut(wanted: Wanted, recipe: Recipe, degrees: Degrees, known: int) -> int:
    """The longest of a mesh that is known to fit `known` tokens, which may lie between two steps of the search."""
    return max(known, longest(wanted, degrees, recipe, beyond=known))
