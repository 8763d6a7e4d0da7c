"""The plan with the least work done again that fits the device and the host.

Candidates run from "keep everything" to "recompute everything"; each is offloaded no further than it must be, from
the first layers on, whose tensors are needed last. Of the candidates that fit, the cheapest by `cost` wins.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from math import inf
from operator import itemgetter
from typing import NamedTuple

from ithaca.planning.memory_plan import Decided, Job, LayerMode, MemoryPlan
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.advice import LIBRARY, Words, refusal
from ithaca.planning.search.bounds import Limits
from ithaca.planning.search.candidates import (
    CHAINS,
    Bounds,
    Candidate,
    Modes,
    given,
    keeping,
    rebuilds,
    running_again,
    uniform,
)
from ithaca.planning.terms.activations import Flow, group_bytes
from ithaca.planning.terms.cost import copy_cost, tile_cost
from ithaca.planning.terms.memory_terms import Frame, Memory

# A head group's buffers and workspace take at most this share of the device.
GROUP_SHARE = 0.05
# No kernel tensor reaches this many elements.
INDEX_LIMIT = 2**31
MLP_TILE_BYTES = 512 * 2**20
LOSS_TILE_BYTES = 2**31
SMALLEST_MLP_TILE, SMALLEST_LOSS_TILE = 2048, 256
# Nothing is decided.
FREE = Decided()


def choose_plan(
    sizes: ModelSizes,
    job: Job,
    device_budget: int,
    host_budget: int = 0,
    decided: Decided = FREE,
    *,
    words: Words = LIBRARY,
) -> MemoryPlan:
    """The cheapest plan within both budgets, in bytes of one rank (its share of the host's); what is decided stays.

    Raises `MemoryPlanError` when nothing fits, with the largest term and the changes that would do, in these `words`.
    """
    fixed = decided.spread(len(sizes.layers))
    plan = cheapest(sizes, job, device_budget, host_budget, fixed)
    if plan is None:
        miss = nearest_miss(sizes, job, host_budget, fixed)
        fits = partial(feasible, sizes, fixed)
        freed = fixed.names if feasible(sizes, FREE, job, device_budget, host_budget) else ()
        raise refusal(sizes, job, miss, device_budget, host_budget, fits=fits, words=words, freed=freed)
    return plan


def cheapest(sizes: ModelSizes, job: Job, device: int, host: int, fixed: Decided) -> MemoryPlan | None:
    """The plan of least cost that fits; smaller pieces are tried only when no plan fits with the usual ones."""
    if not feasible(sizes, fixed, job, device, host):
        return None
    for pieces in (_usual(sizes, job, device, fixed), _small(sizes, job, fixed)):
        tiles = (pieces.mlp_tile,) if fixed.mlp_tile else _tiles(pieces.mlp_tile, job.tokens)
        frames = [Frame(sizes, job, tile, pieces.loss_tile, pieces.head_groups) for tile in tiles]
        best = Found(inf, inf, None)
        for find in (keeping, running_again) if fixed.layers is None else (None,):
            for cost, frame, candidate in _in_order(frames, find, device, host, best.total, fixed):
                if cost >= best.total:
                    break
                modes = candidate.modes()
                offload = _fit(frame, modes, device, host, fixed)
                if offload is not None:
                    fitted = MemoryPlan(modes, offload, frame.mlp_tile, pieces.loss_tile, pieces.head_groups)
                    best = min(best, Found(cost + copy_cost(sizes, job, fitted), cost, fitted), key=Found.order)
        if best.plan is not None:
            return best.plan
    return None


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that fits; of two that cost the same in all, the one with less work done again is better."""

    total: float
    cost: float
    plan: MemoryPlan | None

    def order(self) -> tuple[float, float]:
        return self.total, self.cost


Find = Callable[[Frame, Bounds], Iterator[Candidate]]


def _in_order(
    frames: list[Frame], find: Find | None, device: int, host: int, limit: float, fixed: Decided
) -> list[tuple[int, Frame, Candidate]]:
    """Candidates with nothing offloaded yet, the cheapest first, in each of the frames, which differ in their MLP tile;
    left out are those that cost `limit` or more, or save more than device and host can hold."""
    found = []
    for frame in frames:
        summing = tile_cost(frame.sizes, frame.job, frame.mlp_tile)
        # Saved tensors that stay on the device leave the host nothing but the state it has.
        limits = Limits(frame, device, min(host, frame.host_beside) if fixed.offload is False else host)
        bounds = Bounds(limits.saved, limit - summing, cache(limits.saved_at))
        modes = fixed.modes(len(frame.kinds))
        candidates = (find or keeping)(frame, bounds) if modes is None else given(frame, modes)
        found += [(summing + c.cost, frame, c) for c in candidates]
    return sorted(found, key=lambda each: each[0])


class Pieces(NamedTuple):
    """How large the pieces are that are worked on at once, in a `Frame`'s order."""

    mlp_tile: int
    loss_tile: int
    head_groups: int


def mlp_tile_for(sizes: ModelSizes, job: Job) -> int:
    """About 512 MiB of a tile's activations, forward and backward; a power of two from 2048 on."""
    return _tile(MLP_TILE_BYTES // (2 * sizes.widest * job.compute_bytes), SMALLEST_MLP_TILE, job.tokens)


def loss_tile_for(sizes: ModelSizes, job: Job) -> int:
    """At most about 2 GiB of logits and their gradient, in fp32 where they are not compiled."""
    if job.whole_logits:
        return job.tokens
    each = 2 * job.compute_bytes + (0 if job.fused else 17)
    return _tile(LOSS_TILE_BYTES // (each * sizes.vocabulary), SMALLEST_LOSS_TILE, job.tokens)


def head_groups_for(sizes: ModelSizes, job: Job, device: int) -> int:
    """The fewest groups whose buffers keep to their share and whose tensors can be indexed in 31 bits."""
    # Of numbers of groups that are as large, the first: the others only add calls.
    split = sizes.split(job.sp)
    numbers = {-(-split.most[1] // groups): groups for groups in range(split.most_groups, 0, -1)}
    flows = [Flow.of(sizes, job, groups) for groups in sorted(numbers.values())]
    small = [flow for flow in flows if flow.largest_g < INDEX_LIMIT] or flows[-1:]
    modest = (flow for flow in small if group_bytes(flow) <= GROUP_SHARE * device)
    return next(modest, min(small, key=group_bytes)).groups


def _tile(tokens: int, least: int, whole: int) -> int:
    power = 1 << max(tokens, 1).bit_length() - 1
    return min(max(power, least), whole)


def _usual(sizes: ModelSizes, job: Job, device: int, fixed: Decided) -> Pieces:
    return Pieces(
        mlp_tile=fixed.mlp_tile or mlp_tile_for(sizes, job),
        loss_tile=fixed.loss_tile or loss_tile_for(sizes, job),
        head_groups=fixed.head_groups or head_groups_for(sizes, job, device),
    )


def _small(sizes: ModelSizes, job: Job, fixed: Decided) -> Pieces:
    return Pieces(
        mlp_tile=fixed.mlp_tile or min(SMALLEST_MLP_TILE, job.tokens),
        loss_tile=fixed.loss_tile or (job.tokens if job.whole_logits else min(SMALLEST_LOSS_TILE, job.tokens)),
        head_groups=fixed.head_groups or head_groups_for(sizes, job, 0),
    )


def _tiles(usual: int, whole: int) -> tuple[int, ...]:
    """The usual tile, four times that and so on, and the whole."""
    sizes = []
    while usual < whole:
        sizes.append(usual)
        usual *= 4
    return (*sizes, whole)


def _fit(frame: Frame, modes: Modes, device: int, host: int, fixed: Decided) -> tuple[bool, ...] | None:
    """As few of the first layers offloaded as fit the device; None where that is too much for the host."""
    most = _furthest(frame, modes, device, host, fixed)
    if most is None or fixed.offload is not None:
        return most
    # More layers away, fewer bytes here: the first count that fits is found by halving.
    least = Limits(frame, device, host).least_offloaded(modes)
    counts = range(least, max((index for index, away in enumerate(most) if away), default=-1) + 1)
    number = bisect_left(counts, True, key=lambda count: frame.fits(modes, _first(modes, count), device))
    return _first(modes, least + number)


def _furthest(frame: Frame, modes: Modes, device: int, host: int, fixed: Decided) -> tuple[bool, ...] | None:
    """As many of the first layers offloaded as the host takes, or what was decided; None where that does not fit."""
    room = host - frame.host_beside
    if fixed.offload is not None:
        offload = fixed.flags(modes)
        if offload is None or frame.pinned(modes, offload) > room:
            return None
    else:
        most = _most_offloaded(frame, modes, room)
        if most < 0:
            return None
        offload = _first(modes, most)
    return offload if frame.fits(modes, offload, device) else None


def _most_offloaded(frame: Frame, modes: Modes, room: int) -> int:
    """How many of the first layers the host can take; -1 where it is full without them."""
    pages = list(map(itemgetter(1), frame.all_saves(modes)))
    if "keep" in modes:
        pages = [0 if mode == "keep" else size for mode, size in zip(modes, pages, strict=True)]
    return bisect_right([0, *accumulate(pages)], room) - 1


def _first(modes: Modes, number: int) -> tuple[bool, ...]:
    """The first `number` layers away, but for kept ones."""
    if "keep" not in modes:
        return (True,) * number + (False,) * (len(modes) - number)
    return tuple(i < number and mode != "keep" for i, mode in enumerate(modes))


def _smallest(frame: Frame, fixed: Decided) -> Iterator[Modes]:
    """The plans that can be smallest: one tensor a layer saved, or, for few layers or tokens, least work at once."""
    count = len(frame.kinds)
    if (decided := fixed.modes(count)) is not None:
        yield decided
        return
    modes: tuple[LayerMode, ...] = ("recompute", "save", "keep")
    yield from (uniform(mode, count) for mode in modes)
    for k in CHAINS if rebuilds(frame) else ():
        yield tuple("rebuild" if i % k else "recompute" for i in range(count))


def feasible(sizes: ModelSizes, fixed: Decided, job: Job, device: int, host: int) -> bool:
    """Whether any plan fits, without looking for the best."""
    frame = Frame(sizes, job, *_small(sizes, job, fixed))
    if Limits(frame, device, host).hopeless:
        return False
    return any(_furthest(frame, modes, device, host, fixed) is not None for modes in _smallest(frame, fixed))


def nearest_miss(sizes: ModelSizes, job: Job, host: int, fixed: Decided) -> Memory:
    """The least device memory that can be had, with as many layers away as the host takes."""
    frame = Frame(sizes, job, *_small(sizes, job, fixed))
    misses = []
    for modes in _smallest(frame, fixed):
        if fixed.offload is not None:
            offload = fixed.flags(modes)
        else:
            offload = _first(modes, max(0, _most_offloaded(frame, modes, host - frame.host_beside)))
        if offload is not None:
            misses.append(frame.memory(modes, offload))
    return min(misses, key=lambda memory: memory.device_bytes)
