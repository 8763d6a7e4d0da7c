"""`StageDegrees`: the sequence-parallel degree of each stage, and the refusal of a degree that fits nothing.

`ithaca train` checks the degrees before it starts ranks, and the ranks check again: another launcher may have started
them, and they have read the model's heads. A refusal names only settings that work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ithaca.config.schema import MeshSettings, StageSettings
from ithaca.errors import MeshError
from ithaca.mesh import largest_divisor
from ithaca.quantities import plural

# Returns what the user types for a number of ranks; None if so many cannot be had.
TypedRanks = Callable[[int], str | None]


def another_launcher(ranks: int) -> str | None:
    """Return the advice for a number of ranks that torchrun or srun decides."""
    return f"{ranks} ranks"


@dataclass(frozen=True, slots=True)
class StageDegrees:
    """The degrees that a run asks for, over `world` ranks. `heads`: the model's attention heads; None if not known."""

    mesh: MeshSettings
    stages: Sequence[StageSettings]
    world: int
    heads: int | None
    typed: TypedRanks = another_launcher

    def check(self) -> None:
        """Refuse a run whose stages or replicas do not fit the ranks."""
        self.mesh.refuse_ring()
        for number in range(len(self.stages)):
            self._check_stage(number)
        copies = self.mesh.replicas
        if self.world % copies:
            works = min(_divisors(self.world), key=lambda n: (abs(n - copies), n))
            raise MeshError(f"mesh.replicas={copies} does not divide {self._ranks}: use mesh.replicas={works}")

    def sp(self, number: int) -> int:
        """Return the degree of stage `number`: the stage's own, the run's, or as many ranks as have a head each."""
        self.mesh.refuse_ring()
        self._check_stage(number)
        return self._degree(self.stages[number], self.world)

    def _degree(self, stage: StageSettings, world: int) -> int:
        asked = stage.sp or self.mesh.sp
        return largest_divisor(world, self.heads or world) if asked == "auto" else asked

    def _check_stage(self, number: int) -> None:
        stage, world, heads = self.stages[number], self.world, self.heads
        name = f"stages.{number}.sp" if stage.sp else "mesh.sp"
        if (stage.sp or self.mesh.sp) == "auto" and heads is None:
            return
        sp = self._degree(stage, world)
        # A degree is advised only if it fits all stages that have the same setting.
        batch = math.gcd(*(each.batch for each in self.stages if each.sp == stage.sp))
        fitting = [each for each in _divisors(world) if each <= (heads or world) and batch % (world // each) == 0]
        near = sorted(fitting, key=lambda degree: (abs(degree - sp), degree))
        advised = [f"{name}={degree}" for degree in near[:1]]
        if heads is not None and sp > heads:
            problem = (
                f"{name}={sp}, but the model has {plural(heads, 'attention head')}, and every rank of a row needs one"
            )
        elif world % sp:
            problem = f"{name}={sp} does not divide {self._ranks}"
            worlds = sorted((sp * dp for dp in _divisors(batch)), key=lambda ranks: (abs(ranks - world), ranks))
            advised += islice(filter(None, map(self.typed, worlds)), 1)
        elif stage.batch % (world // sp):
            groups = f"dp={world // sp} sequence groups"
            problem = f"stage {number + 1} has batch {stage.batch} over {groups}, and a multiple is needed"
            # Fewer, larger sequence groups if there are any; else fewer ranks.
            larger = [f"{name}={degree}" for degree in fitting if degree > sp][:1]
            fewer = islice(filter(None, map(self.typed, self._smaller_worlds())), 1)
            advised = [_typed_batch(number, stage.batch, world // sp), *(larger or advised or fewer)]
        else:
            return
        if not advised:
            sp = largest_divisor(world, heads or world)
            advised = [f"{name}={sp} with {_typed_batch(number, stage.batch, world // sp)}"]
        raise MeshError(f"{problem}: use {', or '.join(advised)}")

    def _smaller_worlds(self) -> Iterator[int]:
        """Yield smaller numbers of ranks that fit all stages as they are, the largest first."""
        for ranks in range(self.world - 1, 0, -1):
            tried = [(stage, self._degree(stage, ranks)) for stage in self.stages]
            if all(ranks % sp == 0 and stage.batch % (ranks // sp) == 0 for stage, sp in tried):
                yield ranks

    @property
    def _ranks(self) -> str:
        return f"the {plural(self.world, 'rank')} of this run"


def _typed_batch(number: int, batch: int, dp: int) -> str:
    """Return the setting of the next larger batch that `dp` sequence groups divide."""
    return f"stages.{number}.batch={-(-batch // dp) * dp}"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
