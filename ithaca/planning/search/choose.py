"""The plan with the least work done again that fits the device and the host: plain loops over a small family of plans.

From the first layer to the last, a plan of the family has one of three forms:

    s s s s s s s s s K K K     the last layers keep everything, the others save
    s r s r s r s s s s s s     the first layers in chains of one length, the others save
    R r R r R r s r r r s r     chains of a short length up to a turn, of a longer one from there; some roots recompute

`K` is keep, `s` save, `r` rebuild, `R` recompute; each `r` is rebuilt from the root before it. Chains have 1, 2 or 4
layers, and a chain of one layer is a root alone. Of all roots the cheapest to recompute do so first. In each form the
first layers are offloaded, whose tensors backward needs last, and only as many as must be.

The memory model (`terms/memory_terms.py`) decides if a plan fits, the cost model (`terms/cost.py`) which plan is best. In
a row of plans that differ in one number, each plan costs more and takes less memory than the one before it: the first
that fits is found by bisection. Everything else is a loop.

    plan = choose_plan(sizes, job, device_budget, host_budget)      # None if no plan fits
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations
from math import inf
from operator import attrgetter

from ithaca.planning.memory_plan import MODES, UNDECIDED, Decided, Job, LayerMode, MemoryPlan
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.tilings import Tiling, mlp_tiles, smallest_tiling, usual_tiling
from ithaca.planning.terms.cost import copy_cost, run_again, tile_cost
from ithaca.planning.terms.memory_terms import SLACK, MemoryModel, ModesMemory
from ithaca.planning.terms.step_memory import StepMemory

Modes = tuple[LayerMode, ...]
# Layers from one root to the next. A longer chain saves less and holds more while it is rebuilt. Gradients take most in
# the backward of the first layers, which have the shorter chains where two lengths are used.
CHAINS = (1, 2, 4)


def choose_plan(
    sizes: ModelSizes, job: Job, device: int, host: int = 0, decided: Decided = UNDECIDED
) -> MemoryPlan | None:
    """Return the cheapest plan within `device` and `host` bytes of one rank; None if no plan fits."""
    decided = decided.spread(len(sizes.layers))
    if not feasible(sizes, decided, job, device, host):
        return None
    for tiling in (usual_tiling(sizes, job, device, decided), smallest_tiling(sizes, job, decided)):
        tiles = (tiling.mlp_tile,) if decided.mlp_tile else mlp_tiles(tiling.mlp_tile, job.tokens)
        searches = [Search(sizes, job, tiling._replace(mlp_tile=tile), device, host, decided) for tile in tiles]
        best = NONE
        searches = [search for search in searches if search.possible()]
        # Plans that run no attention again come first: where one fits, few of the others cost less.
        for search in searches:
            best = search.keep(best)
        for search in searches:
            best = search.run_again(best)
        if best.plan is not None:
            return best.plan
    return None


@dataclass(frozen=True, slots=True)
class Best:
    """The best plan so far and its costs in FLOPs: `total`, and of that `again`, work done again without host copies."""

    total: float
    again: float
    plan: MemoryPlan | None


NONE = Best(inf, inf, None)


class Search:
    """The search among plans with given tiles and head groups."""

    def __init__(self, sizes: ModelSizes, job: Job, tiling: Tiling, device: int, host: int, decided: Decided) -> None:
        self.sizes, self.job, self.tiling = sizes, job, tiling
        self.device, self.host, self.decided = device, host, decided
        self.count = len(sizes.layers)
        self.memory = MemoryModel(sizes, job, *tiling)

    def possible(self) -> bool:
        """True if any plan fits with these tiles."""
        return any(map(self.fits_offloaded, _smallest(self)))

    def keep(self, best: Best) -> Best:
        """Return the better of `best` and the plans that keep the last layers, or whose modes are decided."""
        modes = self.decided.modes(self.count)
        if modes is not None:
            return self.better(best, modes)
        # The row below takes less and less memory, but for its first plan: with few layers, keeping all of them can take less
        # than saving, since no work is repeated beside them.
        best = self.better(best, uniform("keep", self.count))
        keeps, saves = self.costs(uniform("keep", self.count)), self.costs(uniform("save", self.count))
        costs = [self.summing + sum(saves[:n]) + sum(keeps[n:]) for n in range(self.count + 1)]
        # A kept layer's tensors cannot be offloaded; those of the last layers are freed soonest.
        return self.cheapest(best, costs, lambda n: uniform("save", n) + uniform("keep", self.count - n))

    def run_again(self, best: Best) -> Best:
        """Return the better of `best` and the plans with chains and with layers that recompute."""
        # Every one of them costs more than saving each layer's input and attention.
        if self.decided.layers is not None or self.again(uniform("save", self.count)) >= best.total:
            return best
        lengths = CHAINS if rebuilds(self.sizes) else CHAINS[:1]
        for length in lengths:
            best = self.recompute(best, range(0, self.count, length))
            if length > 1:
                best = self.rebuild(best, length)
        for short, long in combinations(lengths, 2):
            for turn in range(long, self.count, long):
                best = self.recompute(best, (*range(0, turn, short), *range(turn, self.count, long)))
        return best

    def rebuild(self, best: Best, length: int) -> Best:
        """Return the better of `best` and the plans whose first layers are in chains of one length, the others saved."""

        def modes_of(number: int) -> Modes:
            return (chain("save", length) * number + uniform("save", self.count))[: self.count]

        costs = [self.again(modes_of(number)) for number in range(self.count // length + 1)]
        return self.cheapest(best, costs, modes_of, few_copies=False)

    def recompute(self, best: Best, roots: Sequence[int]) -> Best:
        """Return the better of `best` and the plans with chains from these roots, of which some recompute."""
        order = sorted(roots, key=self.attention.__getitem__)
        chains = chained(self.count, roots)
        costs = [*accumulate(map(self.attention.__getitem__, order), initial=self.again(chains))]

        def recomputed(number: int) -> Modes:
            modes = list(chains)
            for root in order[:number]:
                modes[root] = "recompute"
            return tuple(modes)

        return self.cheapest(best, costs, recomputed, few_copies=len(roots) == self.count)

    def cheapest(
        self, best: Best, costs: Sequence[int], modes_of: Callable[[int], Modes], *, few_copies: bool = True
    ) -> Best:
        """Return the better of `best` and the plans of a row, each of which costs more and takes less memory than the one
        before it: the first plan that fits or, with `few_copies`, a later one whose host copies cost less."""
        # Most rows end here: no plan of the row that could be the best so far fits.
        most = bisect_left(costs, best.total) - 1
        if most < 0 or not self.fits_offloaded(modes_of(most)):
            return best
        first = bisect_left(range(most), True, key=lambda n: self.fits_offloaded(modes_of(n)))
        # Copies cost where attention is short. There a chain costs more than recomputing: few copies are looked for without.
        for number in range(first, most + 1 if few_copies else first + 1):
            if costs[number] >= best.total:
                break
            best = self.better(best, modes_of(number))
        return best

    def better(self, best: Best, modes: Modes) -> Best:
        """Return the better of `best` and the plan with these modes, as few layers of which are offloaded as must be."""
        again = self.again(modes)
        if again >= best.total or (offload := self.offload(modes)) is None:
            return best
        plan = MemoryPlan(modes, offload, *self.tiling)
        total = again + copy_cost(self.sizes, self.job, plan)
        return Best(total, again, plan) if (total, again) < (best.total, best.again) else best

    def offload(self, modes: Modes) -> tuple[bool, ...] | None:
        """Return which layers to offload, as few as fit the device; None if the host cannot take so many."""
        memory = ModesMemory(self.memory, modes)
        most = self.furthest(memory)
        if most is None or self.decided.offload is not None:
            return most
        counts = range(sum(most))
        return _first(modes, bisect_left(counts, True, key=lambda n: self.fits(memory, _first(modes, n))))

    def fits_offloaded(self, modes: Modes) -> bool:
        """True if a plan with these modes fits that offloads as many layers as the host takes."""
        return self.furthest(ModesMemory(self.memory, modes)) is not None

    def furthest(self, memory: ModesMemory) -> tuple[bool, ...] | None:
        """Return as many of the first layers as the host takes, or those decided; None if the plan does not fit then."""
        host = self.host - self.memory.host_beside_saved
        # Most plans that do not fit end here.
        if host < 0 or sum(memory.saved) > self.most_saved:
            return None
        offload = self.most_offloaded(memory) if self.decided.offload is None else self.decided.flags(memory.modes)
        if offload is None or memory.host_bytes(offload) > host:
            return None
        return offload if self.fits(memory, offload) else None

    def most_offloaded(self, memory: ModesMemory) -> tuple[bool, ...]:
        """Return as many of the first layers as the host can take."""
        pages = [0 if mode == "keep" else layer.pinned for mode, layer in zip(memory.modes, memory.layers, strict=True)]
        return _first(memory.modes, bisect_right([*accumulate(pages)], self.host - self.memory.host_beside_saved))

    def fits(self, memory: ModesMemory, offload: Sequence[bool]) -> bool:
        return memory.device_bytes(offload) <= self.device

    def again(self, modes: Modes) -> int:
        """Return the FLOPs done again under these modes, sums of weight gradients over tiles among them."""
        return self.summing + sum(self.costs(modes))

    def costs(self, modes: Modes) -> list[int]:
        """Return the FLOPs that each layer does again."""
        return [self.prices[key] for key in zip(self.sizes.kinds, modes, strict=True)]

    @cached_property
    def prices(self) -> dict[tuple[int, LayerMode], int]:
        """FLOPs done again by a layer of each kind in each mode."""
        sizes, tiled = self.sizes, self.memory.tiled
        kinds = dict(zip(sizes.kinds, sizes.layers, strict=True))
        return {(k, mode): run_again(sizes, self.job, kinds[k], mode, tiled=tiled) for k in kinds for mode in MODES}

    @cached_property
    def most_saved(self) -> float:
        """Bytes that all layers together can save: at the loss, saved tensors lie on the device or on the host."""
        memory = self.memory
        device = self.device - memory.standing_bytes[False] - memory.gradient_bytes(0)
        return (device + 1) / (1 + SLACK) - memory.at_loss + max(0, self.host - memory.host_beside_saved)

    @cached_property
    def summing(self) -> int:
        return tile_cost(self.sizes, self.job, self.tiling.mlp_tile)

    @cached_property
    def attention(self) -> list[int]:
        """FLOPs of each layer's attention, forward: what recomputing the layer costs more than saving."""
        return [self.prices[kind, "recompute"] - self.prices[kind, "save"] for kind in self.sizes.kinds]


def rebuilds(sizes: ModelSizes) -> bool:
    """True if a layer's input may be rebuilt from an earlier layer's."""
    # Not through experts: a rebuilt input differs in its last bits, and could choose others. Nor where a layer's input is
    # more than the output of the one before it.
    return sizes.linked and not any(map(attrgetter("experts"), sizes.layers))


def uniform(mode: LayerMode, count: int) -> Modes:
    return (mode,) * count


def chain(root: LayerMode, length: int) -> Modes:
    """Return the modes of one chain."""
    return (root, *uniform("rebuild", length - 1))


def chained(count: int, roots: Sequence[int]) -> Modes:
    """Return the modes of chains that begin at these roots."""
    modes: list[LayerMode] = ["rebuild"] * count
    for root in roots:
        modes[root] = "save"
    return tuple(modes)


def _first(modes: Sequence[LayerMode], number: int) -> tuple[bool, ...]:
    """Offload the first `number` layers, but for kept ones."""
    if "keep" in modes:
        return tuple(i < number and mode != "keep" for i, mode in enumerate(modes))
    return (True,) * number + (False,) * (len(modes) - number)


def feasible(sizes: ModelSizes, decided: Decided, job: Job, device: int, host: int) -> bool:
    """True if any plan fits; the best one is not looked for."""
    search = Search(sizes, job, smallest_tiling(sizes, job, decided), device, host, decided)
    return search.possible()


def nearest_miss(sizes: ModelSizes, job: Job, host: int, decided: Decided) -> StepMemory:
    """Return the least memory that any plan takes, with as many layers offloaded as the host takes."""
    search = Search(sizes, job, smallest_tiling(sizes, job, decided), 0, host, decided)
    misses = []
    for modes in _smallest(search):
        memory = ModesMemory(search.memory, modes)
        offload = search.most_offloaded(memory) if decided.offload is None else decided.flags(modes)
        if offload is not None:
            misses.append(memory.memory(offload))
    return min(misses, key=lambda memory: memory.device_bytes)


def _smallest(search: Search) -> Iterator[Modes]:
    """Yield the modes that can take least: one tensor a layer saved or, for few layers or tokens, least work at once."""
    count = search.count
    if (decided := search.decided.modes(count)) is not None:
        yield decided
        return
    yield from (uniform("recompute", count), uniform("save", count), uniform("keep", count))
    for length in CHAINS[1:] if rebuilds(search.sizes) else ():
        yield (chain("recompute", length) * count)[:count]
