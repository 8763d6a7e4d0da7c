"""The best mesh for a job: every cut of the GPUs into dp x ring x sp, each with its own memory plan and its time.

Numerics come first: AdamW over fp32 weights is taken wherever it fits, on the device or on the host; an optimizer with
less state only where AdamW fits nowhere. Within the numerics the most tokens a second win, and of equals the fewest rows.
GPUs are left idle only where no plan over all of them fits.

    best_options(PlanRequest(sizes, machine), length)[0].plan

Invariant: the chosen mesh can run. Ring attention is not built yet, so rings are for comparison only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ithaca.planning.memory_plan import Job, MemoryPlan
from ithaca.planning.search.choose import choose_plan
from ithaca.planning.search.longest import longest
from ithaca.planning.search.meshes import SubMesh, all_degrees, meshes_of_all, meshes_of_parts
from ithaca.planning.search.request import MeshShape, PlanRequest, Recipe, job_of, recipes
from ithaca.planning.terms.memory_terms import memory_of
from ithaca.planning.terms.step_memory import StepMemory
from ithaca.planning.terms.step_time import StepTime, step_time
from ithaca.planning.terms.traffic import Machine

# Speeds that differ by less than this share are taken for equal.
AS_FAST = 0.01
# State goes to the host for no smaller gain: the speed of its optimizer step depends on what else uses the host's memory.
HOST_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class Option:
    """A mesh with everything that follows from it; `machine` is what the mesh uses, all of the machine or a part."""

    machine: Machine
    degrees: MeshShape
    recipe: Recipe
    rows: int
    job: Job
    plan: MemoryPlan
    memory: StepMemory
    time: StepTime

    @property
    def runnable(self) -> bool:
        return self.degrees.ring == 1


def best_options(request: PlanRequest, length: int) -> list[Option]:
    """Return the options that run and fit, the most tokens a second first; all have the numerics of the first that fit."""
    for find in (meshes_of_all, meshes_of_parts):
        meshes = find(request)
        for group in recipes(request):
            found: list[Option] = []
            for recipe in group:
                found += _with_recipe(request, length, recipe, meshes)
                # State on the host leaves room on the device: worth a look only where layers would be run again.
                if found and not {"rebuild", "recompute"} & {*_ranked(found)[0].plan.layers}:
                    break
            if found:
                return _ranked(found)
    return []


def _with_recipe(request: PlanRequest, length: int, recipe: Recipe, meshes: list[SubMesh]) -> list[Option]:
    """Return the options that fit with one recipe."""
    found = [option for mesh in meshes for option in _options(*mesh, length, recipe)]
    # Of a part of the machine, `meshes` has the mesh that reaches furthest; others may be faster where they fit too.
    for machine in dict.fromkeys(mesh.request.machine for mesh in meshes):
        if any(option.machine == machine for option in found):
            part = replace(request, machine=machine)
            known = {mesh.degrees for mesh in meshes if mesh.request.machine == machine}
            for degrees in all_degrees(part):
                found += [] if degrees in known else _options(part, degrees, length, recipe)
    return found


def _ranked(options: list[Option]) -> list[Option]:
    """Sort by speed; of options that are as fast as a prediction can tell, the fewest rows a step come first."""
    options = sorted(options, key=_speed, reverse=True)
    least = (1 - AS_FAST) * _speed(options[0])
    level = [option for option in options if _speed(option) >= least]
    level.sort(key=lambda option: option.degrees.dp)
    return level + options[len(level) :]


def _speed(option: Option) -> float:
    return option.time.tokens_per_second * (1 - HOST_GAIN if option.recipe.on_host else 1)


def _options(request: PlanRequest, degrees: MeshShape, length: int, recipe: Recipe) -> Iterator[Option]:
    job, rows = job_of(request, length, degrees, recipe)
    nodes = request.machine.nodes
    # A copy of the weights in each node keeps gathers off the network, where there is memory for the copies.
    for replicas in (1, nodes) if nodes > 1 else (1,):
        copied = replace(job, replicas=replicas)
        plan = choose_plan(request.sizes, copied, *request.budgets)
        if plan is None:
            # More copies only take more memory.
            return
        memory = memory_of(request.sizes, copied, plan)
        time = step_time(request.sizes, copied, plan, request.machine, rows=rows)
        yield Option(request.machine, degrees, recipe, rows, copied, plan, memory, time)


def option_of(request: PlanRequest, length: int, degrees: MeshShape, recipe: Recipe) -> Option | None:
    """Return the option of one mesh, runnable or not, with the faster number of copies of the weights; None if it does not
    fit."""
    options = _options(request, degrees, length, recipe)
    return max(options, key=lambda option: option.time.tokens_per_second, default=None)


class Compared(NamedTuple):
    """One mesh beside the chosen one: the longest row it takes, and its option at the requested length, if it fits."""

    degrees: MeshShape
    longest: int
    option: Option | None
    chosen: bool


def compare(request: PlanRequest, chosen: Option) -> list[Compared]:
    """Compare every mesh over the GPUs of the chosen one, with its numerics, rings among them."""
    used, length = replace(request, machine=chosen.machine), chosen.job.length
    rows = []
    for degrees in all_degrees(used, rings=True):
        mine = degrees == chosen.degrees
        option = chosen if mine else option_of(used, length, degrees, chosen.recipe)
        reach = longest_so_cut(used, chosen.recipe, degrees, length if option is not None else 0)
        rows.append(Compared(degrees, reach, option, mine))
    return rows


def longest_so_cut(request: PlanRequest, recipe: Recipe, degrees: MeshShape, known: int) -> int:
    """Return the longest row of a mesh that is known to fit `known` tokens, which may lie between two steps."""
    return max(known, longest(request, degrees, recipe, beyond=known))
