"""Few layers run, the rest derived: which layers stand for all of them, and what follows for the whole.

A plan's layers fall into blocks: a layer with those whose inputs are rebuilt from it. Blocks of the same sizes, modes
and places of their saved tensors cost the same, so a figure of the whole is that of a first run, which has a few blocks
of every kind, and for each kind the missing blocks times what one of them adds. Seconds that one adds are clocked in the
first run, block by block. Bytes that one adds are seen in a second run with more blocks of that kind: for a plan of one
kind, the line through two runs. As attention takes most of a long step's time and keeps nothing, runs for bytes may go
without it; then the first is run so too, and lines go through runs of one sort.

Invariant: `derive` of runs that keep to such a line is exact, and runs of the whole model are not derived from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from ithaca.planning.memory_plan import LayerMode, MemoryPlan

# Blocks of each kind in the first run, as two layers' tensors are on their way out at once; and layers of each size, as
# FSDP2 gathers up to three at once.
FIRST, FIRST_OF_SIZE = 2, 3
# Layers that a later run has more, unless told.
MORE = 3
# What a layer without attention takes of one with it, where steps are long enough to be cut; an upper bound.
BARE = 0.2


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: its layers, how many blocks of each kind they are, and the blocks in order: kind and number of layers."""

    layers: tuple[int, ...]
    counts: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]


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


def choose_trials(plan: MemoryPlan, kinds: Sequence[int], more: int | None = MORE, *, bare: bool = False) -> Trials:
    """Which layers to run; `kinds` numbers layers of equal sizes alike. `more=None`: all of them, in one run.

    `bare`: runs for bytes go without attention.
    """
    blocks = blocks_of(plan)
    names = [tuple((kinds[i], plan.layers[i], plan.offload[i]) for i in block) for block in blocks]
    distinct = list(dict.fromkeys(names))
    whole = tuple(names.count(name) for name in distinct)
    first = _first(names, distinct, whole)
    wider = []
    for at, name in enumerate(distinct) if more is not None else ():
        added = min(whole[at] - first[at], -(-(more or 0) // len(name)))
        if added > 0:
            wider.append(tuple(count + added * (at == place) for place, count in enumerate(first)))
    counts = [first, *wider]
    kinds_of = [distinct.index(name) for name in names]
    runs = [_trial(blocks, kinds_of, each) for each in counts]
    lengths = [len(trial.layers) for trial in runs]
    spent = lengths[0] + BARE * sum(lengths) if bare else sum(lengths)
    if more is None or spent >= len(plan.layers):
        runs = [_trial(blocks, kinds_of, whole)]
    return Trials(tuple(runs), whole)


def _first(
    names: Sequence[tuple[tuple[int, LayerMode, bool], ...]],
    distinct: Sequence[tuple[tuple[int, LayerMode, bool], ...]],
    whole: tuple[int, ...],
) -> tuple[int, ...]:
    """How many blocks of each kind the first run has."""
    first = [min(count, FIRST) for count in whole]
    for size in {size for name in names for size, _, _ in name}:
        held = [sum(layer[0] == size for layer in name) for name in distinct]
        while sum(a * b for a, b in zip(first, held, strict=True)) < FIRST_OF_SIZE:
            more = [at for at, count in enumerate(first) if held[at] and count < whole[at]]
            if not more:
                break
            first[max(more, key=lambda at: whole[at] - first[at])] += 1
    return tuple(first)


def _trial(blocks: list[tuple[int, ...]], kinds: Sequence[int], counts: tuple[int, ...]) -> Trial:
    """The last blocks of each kind, in the model's order: what is kept or staged last stays last."""
    left = list(counts)
    chosen: list[tuple[int, tuple[int, ...]]] = []
    for block, kind in zip(reversed(blocks), reversed(kinds), strict=True):
        if left[kind] > 0:
            left[kind] -= 1
            chosen.insert(0, (kind, block))
    layers = tuple(index for _, block in chosen for index in block)
    return Trial(layers, counts, tuple((kind, len(block)) for kind, block in chosen))


def derive(trials: Trials, values: Sequence[float], first: float | None = None) -> float:
    """The whole's figure from each run's, in the order of `trials.runs`; from `first`, where that is another run's."""
    counts, base = trials.runs[0].counts, values[0]
    total = base if first is None else first
    for trial, value in zip(trials.runs[1:], values[1:], strict=True):
        at = next(place for place, count in enumerate(trial.counts) if count != counts[place])
        total += (value - base) / (trial.counts[at] - counts[at]) * (trials.whole[at] - counts[at])
    return total


def derive_clocked(trials: Trials, first: float, layers: Sequence[float | None]) -> float:
    """The whole's seconds from the first run's and those of its layers, where they are known."""
    run = trials.runs[0]
    clocked: list[list[float]] = [[] for _ in run.counts]
    at = 0
    for kind, length in run.blocks:
        seconds = [s for s in layers[at : at + length] if s is not None]
        if len(seconds) == length:
            clocked[kind].append(sum(seconds))
        at += length
    missing = [every - some for every, some in zip(trials.whole, run.counts, strict=True)]
    return first + sum(count * mean(own) for count, own in zip(missing, clocked, strict=True) if count)


def cut_plan(plan: MemoryPlan, layers: Sequence[int]) -> MemoryPlan:
    """The plan of these layers alone."""
    return MemoryPlan(
        tuple(plan.layers[i] for i in layers),
        tuple(plan.offload[i] for i in layers),
        plan.mlp_tile,
        plan.loss_tile,
        plan.head_groups,
    )
