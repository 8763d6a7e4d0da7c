"""The degree of each stage of a run, and the refusal of one that does not fit the ranks, the heads or the batch.

`ithaca train` asks before it starts ranks, where it knows how many there will be, and the ranks ask again: they may
have been started by another launcher, and they have read the model. A refusal names only settings that work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from ithaca.config.schema import RunSettings
from ithaca.errors import MeshError
from ithaca.mesh import largest_divisor

# How a number of ranks is typed; None where so many cannot be had.
TypedRanks = Callable[[int], str | None]


def another_launcher(ranks: int) -> str | None:
    """Return what is said of a number of ranks that torchrun or srun decides."""
    return f"{ranks} ranks"


def choose_sp(run: RunSettings, number: int, world: int, config: Any, typed: TypedRanks = another_launcher) -> int:
    """The stage's own degree, the run's, or as many ranks as divide the world and have a head each."""
    run.mesh.refuse_ring()
    heads = int(config.num_attention_heads)
    _check_stage(run, number, world, heads, typed)
    asked = run.stages[number].sp or run.mesh.sp
    return largest_divisor(world, heads) if asked == "auto" else asked


def check_degrees(run: RunSettings, world: int, heads: int | None, typed: TypedRanks) -> None:
    """Refuse a run whose stages do not fit `world` ranks. `heads`: the model's attention heads; None if not known."""
    run.mesh.refuse_ring()
    for number in range(len(run.stages)):
        _check_stage(run, number, world, heads, typed)
    copies = run.mesh.replicas
    if world % copies:
        works = min(_divisors(world), key=lambda n: (abs(n - copies), n))
        raise MeshError(f"mesh.replicas={copies} does not divide {_ranks(world)}: use mesh.replicas={works}")


def _check_stage(run: RunSettings, number: int, world: int, heads: int | None, typed: TypedRanks) -> None:
    stage = run.stages[number]
    asked, name = stage.sp or run.mesh.sp, f"stages.{number}.sp" if stage.sp else "mesh.sp"
    if asked == "auto" and heads is None:
        return
    sp = largest_divisor(world, heads or world) if asked == "auto" else asked
    # What is advised must go for all stages that the setting is of.
    batches = [each.batch for each in run.stages if each.sp == stage.sp]
    near = sorted(_degrees(batches, world, heads), key=lambda degree: (abs(degree - sp), degree))
    advised = [f"{name}={degree}" for degree in near[:1]]
    if heads is not None and sp > heads:
        problem = f"{name}={sp}, but the model has {_many(heads, 'attention head')}, and every rank of a row needs one"
    elif world % sp:
        problem = f"{name}={sp} does not divide {_ranks(world)}"
        advised += [words for words in map(typed, _worlds(batches, world, sp)) if words][:1]
    elif stage.batch % (world // sp):
        problem = f"stage {number + 1} has batch {stage.batch} over dp={world // sp} sequence groups, and a multiple is needed"
        # Fewer, larger sequence groups, if any.
        larger = [f"{name}={degree}" for degree in sorted(near) if degree > sp][:1]
        fewer = (words for words in map(typed, _fewer(run, world, heads)) if words)
        advised = [_batch(number, stage.batch, world // sp), *(larger or advised or islice(fewer, 1))]
    else:
        return
    if not advised:
        sp = largest_divisor(world, heads or world)
        advised = [f"{name}={sp} with {_batch(number, stage.batch, world // sp)}"]
    raise MeshError(f"{problem}: use {', or '.join(advised)}")


def _batch(number: int, batch: int, dp: int) -> str:
    return f"stages.{number}.batch={-(-batch // dp) * dp}"


def _degrees(batches: Iterable[int], world: int, heads: int | None) -> list[int]:
    """The degrees at which stages of these batches go."""
    common = math.gcd(*batches)
    return [sp for sp in _divisors(world) if sp <= (heads or world) and common % (world // sp) == 0]


def _worlds(batches: Iterable[int], world: int, sp: int) -> Iterable[int]:
    """Numbers of ranks on which stages of these batches go at degree `sp`, the nearest to `world` first."""
    works = [sp * dp for dp in _divisors(math.gcd(*batches))]
    return sorted(works, key=lambda ranks: (abs(ranks - world), ranks))


def _fewer(run: RunSettings, world: int, heads: int | None) -> Iterable[int]:
    """Smaller numbers of ranks on which all stages go as they are, the largest first."""
    for ranks in range(world - 1, 0, -1):
        degrees = [stage.sp or run.mesh.sp for stage in run.stages]
        tried = [largest_divisor(ranks, heads or ranks) if sp == "auto" else sp for sp in degrees]
        if all(
            ranks % sp == 0 and stage.batch % (ranks // sp) == 0 for sp, stage in zip(tried, run.stages, strict=True)
        ):
            yield ranks


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _ranks(world: int) -> str:
    return f"the {_many(world, 'rank')} of this run"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
