"""The plans a choice is made from, without building one: each is a recipe for its layers' modes, its cost and its bytes.

Candidates run from "keep everything" to "recompute everything". A family's members differ in a layer or two, so costs
and saved bytes are carried from one to the next, and what costs too much or saves too much is never written out: a
hundred layers have ten thousand candidates.

Invariant: `Candidate.cost` is `recompute_cost` and `Candidate.saved` what all layers save, of the modes that
`Candidate.modes` builds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import inf
from typing import NamedTuple

from ithaca.planning.memory_plan import MODES, LayerMode
from ithaca.planning.model.flops import attention_flops
from ithaca.planning.terms.cost import run_again
from ithaca.planning.terms.memory_terms import Frame

Modes = tuple[LayerMode, ...]
# Chains of rebuilt inputs: every k-th layer saves its own.
CHAINS = (2, 4)


class Candidate(NamedTuple):
    """FLOPs done again, bytes saved wherever they are kept, and how to write the modes out."""

    cost: int
    saved: int
    modes: Callable[[], Modes]


# Of every layer, by mode: FLOPs done again and bytes saved.
Prices = dict[LayerMode, list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Candidates of interest cost less than `limit` and save no more bytes than `room`, nor up to a layer than `at` says of
    how it is kept: its index, so many layers behind the root of its chain, and that one's mode."""

    room: float
    limit: float
    at: Callable[[int, int, LayerMode], float] = lambda index, place, root: inf


def given(frame: Frame, layers: Modes) -> Iterator[Candidate]:
    """The one candidate there is where the modes are decided."""
    prices = _prices(frame)
    cost, size = _sum(prices[mode][index] for index, mode in enumerate(layers))
    yield Candidate(cost, size, lambda: layers)


def keeping(frame: Frame, bounds: Bounds) -> Iterator[Candidate]:
    """The last layers kept, the others saved: a kept layer's backward comes first and frees it soonest."""
    tally = _Tally(_prices(frame), bounds)
    count = len(frame.kinds)
    for kept in range(count + 1):
        if kept:
            tally.change(count - kept, "save", "keep")
        if tally.wanted(0, "keep" if kept else "save"):
            yield tally.candidate(partial(_kept, count, kept))


def running_again(frame: Frame, bounds: Bounds) -> Iterator[Candidate]:
    """Inputs rebuilt in chains, layers recomputed, or both."""
    prices = _prices(frame)
    if rebuilds(frame):
        yield from _chains(prices, bounds)
        yield from _turning_chains(prices, bounds)
    yield from _recomputing(frame, prices, bounds)


def rebuilds(frame: Frame) -> bool:
    """Not through experts: a rebuilt input differs in its last bits and could choose others. Nor where a layer's input is
    more than the output of the one before."""
    return frame.sizes.linked and not any(layer.experts for layer in frame.sizes.layers)


def uniform(mode: LayerMode, count: int) -> Modes:
    return (mode,) * count


def _prices(frame: Frame) -> Prices:
    sizes, job = frame.sizes, frame.job
    known: dict[tuple[int, LayerMode], tuple[int, int]] = {}
    for index, kind in enumerate(frame.kinds):
        for mode in MODES:
            if (kind, mode) not in known:
                flops = run_again(sizes, job, sizes.layers[index], mode, tiled=frame.tiled)
                known[kind, mode] = flops, frame.saves(index, mode)[0]
    return {mode: [known[kind, mode] for kind in frame.kinds] for mode in MODES}


def _sum(pairs: Iterator[tuple[int, int]]) -> tuple[int, int]:
    cost = size = 0
    for each, of in pairs:
        cost, size = cost + each, size + of
    return cost, size


class _Tally:
    """Cost and bytes of a candidate that is changed layer by layer, from all layers "save"."""

    def __init__(self, prices: Prices, bounds: Bounds) -> None:
        self.prices, self.room, self.limit, self.at = prices, bounds.room, bounds.limit, bounds.at
        self.last = len(prices["save"]) - 1
        self.cost, self.saved = _sum(iter(prices["save"]))
        # The most that one layer frees by recomputing its attention.
        self.most_freed = max(a[1] - b[1] for a, b in zip(prices["save"], prices["recompute"], strict=True))

    def change(self, index: int, before: LayerMode, after: LayerMode) -> None:
        cost, size = self.prices[before][index]
        self.cost, self.saved = self.cost - cost, self.saved - size
        cost, size = self.prices[after][index]
        self.cost, self.saved = self.cost + cost, self.saved + size

    def wanted(self, place: int, root: LayerMode) -> bool:
        return self.cost < self.limit and self.saved <= self.room and self.saved <= self.at(self.last, place, root)

    def wanted_before(self, roots: Sequence[int], last: LayerMode, before: LayerMode) -> bool:
        """Whether what is saved when the last chain is done is wanted too, whose root is under `last`, the one's before it
        under `before`: that chain may be the longer one, and gradients wait beside it."""
        if len(roots) < 2:
            return True
        chain = self.prices["rebuild"][roots[-1] + 1 :]
        saved = self.saved - self.prices[last][roots[-1]][1] - sum(size for _, size in chain)
        return saved <= self.at(roots[-1] - 1, roots[-1] - 1 - roots[-2], before)

    def candidate(self, modes: Callable[[], Modes]) -> Candidate:
        return Candidate(self.cost, self.saved, modes)


def _kept(count: int, kept: int) -> Modes:
    return uniform("save", count - kept) + uniform("keep", kept)


def _chains(prices: Prices, bounds: Bounds) -> Iterator[Candidate]:
    """The first layers in chains, the others saved."""
    count = len(prices["save"])
    for k in CHAINS:
        tally = _Tally(prices, bounds)
        for chained in range(k, count + 1, k):
            for index in range(chained - k + 1, chained):
                tally.change(index, "save", "rebuild")
            if tally.wanted((count - 1) % k if chained == count else 0, "save"):
                yield tally.candidate(partial(_chained, count, k, chained))


def _chained(count: int, k: int, chained: int) -> Modes:
    return tuple("rebuild" if i < chained and i % k else "save" for i in range(count))


def _turning_chains(prices: Prices, bounds: Bounds) -> Iterator[Candidate]:
    """All layers in chains, of which the first begin with recompute.

    A longer chain holds more inputs and anchors while it is worked on. The first layers come last in backward, when
    all gradients are there, so they have the shorter chains where two lengths are used.
    """
    count = len(prices["save"])
    for short, long in combinations((1, *CHAINS), 2):
        base = _Tally(prices, bounds)
        for index in (i for i in range(count) if i % long):
            base.change(index, "save", "rebuild")
        for turn in range(0, count + long, long):
            for index in range(max(turn - long, 0), min(turn, count)):
                if index % long and not index % short:
                    base.change(index, "rebuild", "save")
            if base.cost < bounds.limit:
                yield from _recomputed_roots(base, count, short, long, turn)


def _recomputed_roots(base: _Tally, count: int, short: int, long: int, turn: int) -> Iterator[Candidate]:
    """Chains that turn from short to long at a layer: one of their roots recomputed, then one more, ..."""
    roots = [i for i in range(count) if not i % (short if i < turn else long)]
    place = count - 1 - roots[-1]
    tally = copy(base)
    # Most families are too much whatever is recomputed; that is seen before they are gone through.
    most = min(tally.room, max(tally.at(count - 1, place, root) for root in ("save", "recompute")))
    if tally.saved - len(roots) * tally.most_freed > most:
        return
    first, rest = (tuple(_rooted(count, set(roots), mode)) for mode in ("recompute", "save"))
    for again, root in enumerate(roots, 1):
        tally.change(root, "save", "recompute")
        if tally.cost >= tally.limit:
            return
        last: LayerMode = "recompute" if again == len(roots) else "save"
        before: LayerMode = "recompute" if again >= len(roots) - 1 else "save"
        if tally.wanted(place, last) and tally.wanted_before(roots, last, before):
            yield tally.candidate(partial(_turned, first, rest, root + 1))


def _rooted(count: int, roots: set[int], mode: LayerMode) -> Iterator[LayerMode]:
    return (mode if i in roots else "rebuild" for i in range(count))


def _turned(first: Modes, rest: Modes, until: int) -> Modes:
    """Thousands of these are written out, so they are put together from two."""
    return first[:until] + rest[until:]


def _recomputing(frame: Frame, prices: Prices, bounds: Bounds) -> Iterator[Candidate]:
    """Some layers recomputed. Attention over a window costs little to run again: such layers come first."""
    sizes, job, count = frame.sizes, frame.job, len(prices["save"])
    order = sorted(range(count), key=lambda index: attention_flops(sizes, sizes.layers[index], job))
    tally, last = _Tally(prices, bounds), False
    for again, index in enumerate(order, 1):
        tally.change(index, "save", "recompute")
        last = last or index == count - 1
        if tally.wanted(0, "recompute" if last else "save"):
            yield tally.candidate(partial(_recomputed, count, order, again))


def _recomputed(count: int, order: Sequence[int], again: int) -> Modes:
    chosen = set(order[:again])
    return tuple("recompute" if i in chosen else "save" for i in range(count))
