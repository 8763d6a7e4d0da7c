"""Extrapolation from a few layers to the whole model: the layers to run, and the figures that follow.

A block is a layer together with the layers whose inputs are rebuilt from it:

    modes     recompute rebuild rebuild | recompute rebuild rebuild | save | save | save | keep
    blocks         kind 0                        kind 0              kind 1 ...            kind 2
    first run      2 blocks of kind 0, 2 of kind 1, 1 of kind 2
    second run     one block of kind 0 more     -> bytes that a block of kind 0 adds
    third run      blocks of kind 1 more        -> bytes that a block of kind 1 adds

Blocks of equal sizes, modes and offloading cost the same. So a figure of the whole model is the first run's, plus for
each kind the missing blocks times what one block adds. Added seconds are timed block by block in the first run. Added
bytes are the slope between two runs. Attention takes most of a long step's time and saves no bytes, so runs for bytes may
leave attention out; then the first run is repeated without attention, and slopes are between runs of one sort.

Invariant: `derive` is exact where figures lie on such a line, and nothing is derived where all layers ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from ithaca.planning.memory_plan import LayerMode, MemoryPlan

# Blocks of each kind in the first run, because two layers' tensors are on their way to the host at once; layers of each
# size, because FSDP2 gathers up to three at once.
FIRST, FIRST_OF_SIZE = 2, 3
# Layers that a later run has more, by default.
MORE = 3
# Time of a layer without attention relative to one with attention, where steps are long enough to be cut; an upper bound.
BARE = 0.2

# Size, mode and offloading of each layer of a block.
_BlockKind = tuple[tuple[int, LayerMode, bool], ...]


@dataclass(frozen=True, slots=True)
class PartialRun:
    """One run: indices of its layers, its number of blocks of each kind, and (kind, length) of its blocks in order."""

    layers: tuple[int, ...]
    counts: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PartialRuns:
    """The first run, one more for each kind that has more blocks, and the counts of the whole model."""

    runs: tuple[PartialRun, ...]
    whole: tuple[int, ...]

    @property
    def derived(self) -> bool:
        """True if layers are left out."""
        return self.runs[0].counts != self.whole


def blocks_of(plan: MemoryPlan) -> list[tuple[int, ...]]:
    """Return layer indices, block by block."""
    blocks: list[tuple[int, ...]] = []
    for index, position in enumerate(plan.chain):
        if position:
            blocks[-1] = (*blocks[-1], index)
        else:
            blocks.append((index,))
    return blocks


def choose_runs(plan: MemoryPlan, sizes: Sequence[int], more: int | None = MORE, *, bare: bool = False) -> PartialRuns:
    """Choose the layers of each run; layers of equal `sizes` have equal weights.

    `more`: layers that later runs add; None for all layers in one run. `bare`: runs for bytes go without attention.
    """
    blocks = blocks_of(plan)
    names: list[_BlockKind] = [tuple((sizes[i], plan.layers[i], plan.offload[i]) for i in block) for block in blocks]
    distinct = list(dict.fromkeys(names))
    kinds = [distinct.index(name) for name in names]
    whole = tuple(names.count(name) for name in distinct)
    if more is None:
        return PartialRuns((_last_blocks(blocks, kinds, whole),), whole)
    first = _first_counts(distinct, whole)
    counts = [first]
    for kind, name in enumerate(distinct):
        added = min(whole[kind] - first[kind], -(-more // len(name)))
        if added > 0:
            counts.append(tuple(count + added * (kind == other) for other, count in enumerate(first)))
    runs = tuple(_last_blocks(blocks, kinds, each) for each in counts)
    lengths = [len(run.layers) for run in runs]
    spent = lengths[0] + BARE * sum(lengths) if bare else sum(lengths)
    # Nothing is saved: run the whole model.
    if spent >= len(plan.layers):
        runs = (_last_blocks(blocks, kinds, whole),)
    return PartialRuns(runs, whole)


def _first_counts(distinct: Sequence[_BlockKind], whole: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first run's number of blocks of each kind."""
    first = [min(count, FIRST) for count in whole]
    for size in {size for name in distinct for size, _, _ in name}:
        layers = [sum(layer[0] == size for layer in name) for name in distinct]
        while sum(count * held for count, held in zip(first, layers, strict=True)) < FIRST_OF_SIZE:
            growing = [kind for kind, count in enumerate(first) if layers[kind] and count < whole[kind]]
            if not growing:
                break
            first[max(growing, key=lambda kind: whole[kind] - first[kind])] += 1
    return tuple(first)


def _last_blocks(blocks: list[tuple[int, ...]], kinds: Sequence[int], counts: tuple[int, ...]) -> PartialRun:
    """Return a run of the last blocks of each kind: layers that are kept or offloaded last stay last."""
    left = list(counts)
    chosen: list[tuple[int, tuple[int, ...]]] = []
    for block, kind in zip(reversed(blocks), reversed(kinds), strict=True):
        if left[kind] > 0:
            left[kind] -= 1
            chosen.insert(0, (kind, block))
    layers = tuple(index for _, block in chosen for index in block)
    return PartialRun(layers, counts, tuple((kind, len(block)) for kind, block in chosen))


def derive(runs: PartialRuns, values: Sequence[float], first: float | None = None) -> float:
    """Return the whole model's figure from each run's, in the order of `runs.runs`.

    `first`: the figure to start from, if it is of another sort of run than those that give the slopes.
    """
    counts, base = runs.runs[0].counts, values[0]
    total = base if first is None else first
    for run, value in zip(runs.runs[1:], values[1:], strict=True):
        kind = next(kind for kind, count in enumerate(run.counts) if count != counts[kind])
        total += (value - base) / (run.counts[kind] - counts[kind]) * (runs.whole[kind] - counts[kind])
    return total


def derive_timed(runs: PartialRuns, first: float, layers: Sequence[float | None]) -> float:
    """Return the whole model's seconds from the first run's and from those of its layers, None where unknown."""
    run = runs.runs[0]
    timed: list[list[float]] = [[] for _ in run.counts]
    at = 0
    for kind, length in run.blocks:
        seconds = [s for s in layers[at : at + length] if s is not None]
        if len(seconds) == length:
            timed[kind].append(sum(seconds))
        at += length
    missing = [every - some for every, some in zip(runs.whole, run.counts, strict=True)]
    return first + sum(count * mean(own) for count, own in zip(missing, timed, strict=True) if count)


def cut_plan(plan: MemoryPlan, layers: Sequence[int]) -> MemoryPlan:
    """Return the plan of these layers alone."""
    return MemoryPlan(
        tuple(plan.layers[i] for i in layers),
        tuple(plan.offload[i] for i in layers),
        plan.mlp_tile,
        plan.loss_tile,
        plan.head_groups,
    )
