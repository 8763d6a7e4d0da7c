"""The best mesh for a job: every cut of the GPUs into dp x ring x sp, each with its own plan of memory and its time.

Numerics come first: AdamW over fp32 weights is taken wherever it fits, on the device or else on the host; an optimizer
with less state only where that fits nowhere. Within them the most tokens a second win, and of equals the fewest rows.

Invariant: what is chosen runs. Ring attention is not built yet, so a ring is looked at for comparison only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ithaca.planning.choose import Fixed, cheapest, feasible, nearest_miss
from ithaca.planning.memory import Memory, memory_of
from ithaca.planning.plan import Job, MemoryPlan, Optimizer
from ithaca.planning.sizes import ModelSizes
from ithaca.planning.time import StepTime, step_time
from ithaca.planning.traffic import Machine

Precision = Literal["mixed", "bf16"]
# Lengths are looked for in steps of this many tokens, up to the longest worth naming.
STEP, LONGEST = 1024, 2**28
# Speeds that differ by less than this are taken for equal.
AS_FAST = 0.01
# Where the search for the longest begins.
GUESS = 2**19
_ANY = Fixed()


class Degrees(NamedTuple):
    """How the GPUs are cut."""

    dp: int
    ring: int
    sp: int

    def __str__(self) -> str:
        return f"dp={self.dp}, sp={self.sp}" if self.ring == 1 else f"dp={self.dp}, ring={self.ring}, sp={self.sp}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers a parameter is kept in, and whether weights, gradients and optimizer state live on the host."""

    precision: Precision
    optimizer: Optimizer
    on_host: bool = False

    def __str__(self) -> str:
        kept = "fp32 weights, bf16 computing" if self.precision == "mixed" else "bf16"
        return f"{self.optimizer}, {kept}" + (", all of it on the host" if self.on_host else "")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a plan is asked for. None and empty are left to the search; `batch` is rows a step over all groups."""

    sizes: ModelSizes
    machine: Machine
    headroom: float = 0.25
    batch: int | None = None
    sp: int | None = None
    optimizer: Optimizer | None = None
    precision: Precision | None = None
    on_host: bool | None = None

    @property
    def device_budget(self) -> int:
        return int((1 - self.headroom) * self.machine.device.memory)

    @property
    def host_budget(self) -> int:
        """One rank's share."""
        return int((1 - self.headroom) * self.machine.host_memory / self.machine.gpus)

    @property
    def budgets(self) -> tuple[int, int]:
        return self.device_budget, self.host_budget


@dataclass(frozen=True, slots=True)
class Option:
    """A mesh with everything that follows from it."""

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


def all_degrees(wanted: Wanted, *, rings: bool = False) -> list[Degrees]:
    """Cuts that the heads and the batch allow, the least sp first; with `rings`, of one group also those around one.

    Unless it was asked for, a group does not end in the middle of a node that another one shares.
    """
    world, gpus = wanted.machine.world, wanted.machine.gpus
    found = []
    for sp in _divisors(world):
        if sp > wanted.sizes.heads or (sp != wanted.sp if wanted.sp is not None else gpus % sp and sp % gpus):
            continue
        dp = world // sp
        if not (wanted.batch or dp) % dp:
            found.append(Degrees(dp, 1, sp))
        if rings and dp > 1:
            found.append(Degrees(1, dp, sp))
    return found


def recipes(wanted: Wanted) -> Iterator[list[Recipe]]:
    """Ways to keep parameters, the most exact first; in each the device before the host."""
    pairs: list[tuple[Precision, Optimizer]] = [("mixed", "adamw"), ("mixed", "adamw8bit"), ("bf16", "bf16_sr")]
    if wanted.sizes.adapters:
        # Adapters are few: the frozen weights need no fp32 copy, and no optimizer state is worth saving.
        pairs = [("bf16", "adamw")]
    if wanted.optimizer is not None or wanted.precision is not None:
        usual: Precision = "bf16" if wanted.sizes.adapters or wanted.optimizer == "bf16_sr" else "mixed"
        pairs = [(wanted.precision or usual, wanted.optimizer or "adamw")]
    places = [False, True] if wanted.on_host is None else [wanted.on_host]
    for precision, optimizer in pairs:
        yield [Recipe(precision, optimizer, place) for place in places]


def job_of(wanted: Wanted, length: int, degrees: Degrees, recipe: Recipe) -> tuple[Job, int]:
    """One rank's job, and the rows that its sequence group takes one after another."""
    rows = (wanted.batch or degrees.dp) // degrees.dp
    width = 4 if recipe.precision == "mixed" else 2
    alone = wanted.machine.world == 1 and recipe.precision != "mixed" and not recipe.on_host
    job = Job(
        length=length,
        sp=degrees.sp,
        dp=degrees.dp,
        ring=degrees.ring,
        # On one rank FSDP2 is left out unless it casts or moves the weights.
        weights="none" if alone else "shard",
        weight_bytes=width,
        gradient_bytes=width,
        optimizer=recipe.optimizer,
        accumulate=rows > 1,
        weights_on_host=recipe.on_host,
        gradients_on_host=recipe.on_host,
        optimizer_on_host=recipe.on_host,
    )
    return job, rows


def best_options(wanted: Wanted, length: int) -> list[Option]:
    """What runs and fits, the most tokens a second first; all of one recipe, the first that fits any mesh."""
    for group in recipes(wanted):
        for recipe in group:
            found = [option for degrees in all_degrees(wanted) for option in _options(wanted, length, degrees, recipe)]
            if found:
                return _ranked(found)
    return []


def _ranked(options: list[Option]) -> list[Option]:
    """The fastest first; of those that are as fast as a prediction can tell, the one with the fewest rows a step."""
    options = sorted(options, key=lambda option: -option.time.tokens_per_second)
    least = (1 - AS_FAST) * options[0].time.tokens_per_second
    level = [option for option in options if option.time.tokens_per_second >= least]
    level.sort(key=lambda option: option.degrees.dp)
    return level + options[len(level) :]


def _options(wanted: Wanted, length: int, degrees: Degrees, recipe: Recipe) -> Iterator[Option]:
    job, rows = job_of(wanted, length, degrees, recipe)
    nodes = wanted.machine.nodes
    # A copy of the weights in each node keeps gathers off the network, where there is room for it.
    for replicas in (1, nodes) if nodes > 1 else (1,):
        copied = replace(job, replicas=replicas)
        plan = cheapest(wanted.sizes, copied, *wanted.budgets, _ANY)
        if plan is not None:
            memory = memory_of(wanted.sizes, copied, plan)
            time = step_time(wanted.sizes, copied, plan, wanted.machine, rows=rows)
            yield Option(degrees, recipe, rows, copied, plan, memory, time)


def option_of(wanted: Wanted, length: int, degrees: Degrees, recipe: Recipe) -> Option | None:
    """One mesh, runnable or not; the faster of its copies of the weights."""
    return max(
        _options(wanted, length, degrees, recipe), key=lambda option: option.time.tokens_per_second, default=None
    )


def fits(wanted: Wanted, length: int, degrees: Degrees, recipe: Recipe) -> bool:
    return feasible(wanted.sizes, _ANY, job_of(wanted, length, degrees, recipe)[0], *wanted.budgets)


def longest(wanted: Wanted, degrees: Degrees, recipe: Recipe) -> int:
    """The longest length that fits this mesh, in steps of 1,024 tokens; 0 where none does."""

    def works(steps: int) -> bool:
        return steps * STEP <= LONGEST and fits(wanted, steps * STEP, degrees, recipe)

    low, high = 0, GUESS // STEP
    if works(high):
        while works(high):
            low, high = high, 2 * high
    else:
        while low == 0 and high > 1:
            low, high = (high // 2, high) if works(high // 2) else (0, high // 2)
    # To about a hundredth: a plan is not more exact than that.
    while high - low > max(1, low // 128):
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low * STEP


def longest_of_all(wanted: Wanted) -> tuple[int, Degrees, Recipe] | None:
    """The longest length that runs, with the mesh and recipe for it; of the first numerics that fit at all."""
    for group in recipes(wanted):
        found = [(longest(wanted, cut, recipe), cut, recipe) for recipe in group for cut in _widest(wanted)]
        best = max(found, key=lambda each: each[0], default=None)
        if best is not None and best[0]:
            return best
    return None


def _widest(wanted: Wanted) -> list[Degrees]:
    """The largest sp: a longer shard never fits where a shorter one does not."""
    return all_degrees(wanted)[-1:]


def miss(wanted: Wanted, length: int) -> tuple[Degrees, Recipe, Memory] | None:
    """The nearest miss of the most exact numerics; None where no cut is possible at all."""
    cuts = _widest(wanted)
    misses = []
    for recipe in next(recipes(wanted)) if cuts else ():
        job, _ = job_of(wanted, length, cuts[0], recipe)
        misses.append((cuts[0], recipe, nearest_miss(wanted.sizes, job, wanted.host_budget, _ANY)))
    device, host = wanted.budgets
    return min(misses, key=lambda each: max(each[2].device_bytes / device, each[2].host_bytes / host), default=None)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
