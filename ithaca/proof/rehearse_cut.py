"""Few layers run, the rest derived: which layers stand for all of them, and what follows for the whole.

A plan's layers fall into blocks: a layer with those whose inputs are rebuilt from it. Blocks of the same sizes, modes
and places of their saved tensors cost the same, so a figure of the whole is that of a first run, which has a few blocks
of every kind, and for each kind the missing blocks times what one of them adds. What one adds is seen in a second run
with more blocks of that kind: for a plan of one kind, the line through two runs.

Invariant: `derive` of runs that keep to such a line is exact, and runs of the whole model are not derived from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ithaca.planning.plan import MemoryPlan

# Blocks of each kind in the first run, where there is one kind only and where there are more: FSDP2 gathers up to three
# layers at once, and two layers' tensors are on their way out.
FIRST_ALONE, FIRST = 3, 2
# Layers that a later run has more, unless told.
MORE = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: its layers, and how many blocks of each kind they are."""

    layers: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trials:
    """The first run, one more for each kind that has more blocks than it, and the counts of the whole."""

    runs: tuple[Trial, ...]
    whole: tuple[int, ...]

    @property
    def derived(self) -> bool:
        return self.runs[0].counts != self.whole


def blocks_of(plan: MemoryPlan) -> list[tuple[int, ...]]:
    """Layer indices, block by block."""
    blocks: list[tuple[int, ...]] = []
    for index, place in enumerate(plan.chain):
        if place:
            blocks[-1] = (*blocks[-1], index)
        else:
            blocks.append((index,))
    return blocks


def choose_trials(plan: MemoryPlan, kinds: Sequence[int], more: int | None = MORE) -> Trials:
    """Which layers to run; `kinds` numbers layers of equal sizes alike. `more=None`: all of them, in one run."""
    blocks = blocks_of(plan)
    names = [tuple((kinds[i], plan.layers[i], plan.offload[i]) for i in block) for block in blocks]
    distinct = list(dict.fromkeys(names))
    whole = tuple(names.count(name) for name in distinct)
    first = tuple(min(count, FIRST if len(distinct) > 1 else FIRST_ALONE) for count in whole)
    wider = []
    for at, name in enumerate(distinct) if more is not None else ():
        added = min(whole[at] - first[at], -(-(more or 0) // len(name)))
        if added > 0:
            wider.append(tuple(count + added * (at == place) for place, count in enumerate(first)))
    counts = [first, *wider]
    spent = sum(len(_layers(blocks, names, distinct, each)) for each in counts)
    if more is None or spent >= len(plan.layers):
        counts = [whole]
    return Trials(tuple(Trial(_layers(blocks, names, distinct, c), c) for c in counts), whole)


def _layers(
    blocks: list[tuple[int, ...]],
    names: Sequence[object],
    distinct: Sequence[object],
    counts: Sequence[int],
) -> tuple[int, ...]:
    """The last blocks of each kind, in the model's order: what is kept or staged last stays last."""
    left = dict(zip(distinct, counts, strict=True))
    chosen: list[tuple[int, ...]] = []
    for block, name in zip(reversed(blocks), reversed(names), strict=True):
        if left[name] > 0:
            left[name] -= 1
            chosen.append(block)
    return tuple(index for block in reversed(chosen) for index in block)


def derive(trials: Trials, values: Sequence[float]) -> float:
    """The whole's figure from each run's, in the order of `trials.runs`."""
    first, base = trials.runs[0].counts, values[0]
    total = base
    for trial, value in zip(trials.runs[1:], values[1:], strict=True):
        at = next(place for place, count in enumerate(trial.counts) if count != first[place])
        total += (value - base) / (trial.counts[at] - first[at]) * (trials.whole[at] - first[at])
    return total


def cut_plan(plan: MemoryPlan, layers: Sequence[int]) -> MemoryPlan:
    """The plan of these layers alone."""
    return MemoryPlan(
        tuple(plan.layers[i] for i in layers),
        tuple(plan.offload[i] for i in layers),
        plan.mlp_tile,
        plan.loss_tile,
        plan.head_groups,
    )
