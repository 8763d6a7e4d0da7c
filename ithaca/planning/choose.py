"""The plan with the least work done again that fits the device and the host.

Candidates run from "keep everything" to "recompute everything"; each is offloaded no further than it must be, from
the first layers on, whose tensors are needed last. Of the candidates that fit, the cheapest by `cost` wins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from ithaca.planning.activations import Flow, group_bytes, most_groups, saved
from ithaca.planning.advice import refusal
from ithaca.planning.cost import attention_flops, copy_cost, recompute_cost, tile_cost
from ithaca.planning.memory import Memory, memory_of, standing_terms
from ithaca.planning.plan import Job, LayerMode, MemoryPlan
from ithaca.planning.sizes import ModelSizes

# Chains of rebuilt inputs: every k-th layer saves its own.
CHAINS = (2, 4)
# A head group's buffers and workspace take at most this share of the device.
GROUP_SHARE = 0.05
# No kernel tensor reaches this many elements.
INDEX_LIMIT = 2**31
MLP_TILE_BYTES = 512 * 2**20
LOSS_TILE_BYTES = 2**31
SMALLEST_MLP_TILE, SMALLEST_LOSS_TILE = 2048, 256


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the caller has decided; None is left to the choice."""

    layers: tuple[LayerMode, ...] | None = None
    offload: tuple[bool, ...] | None = None
    mlp_tile: int | None = None
    loss_tile: int | None = None
    head_groups: int | None = None


def choose_plan(
    sizes: ModelSizes,
    job: Job,
    device_budget: int,
    host_budget: int = 0,
    *,
    layers: Sequence[LayerMode] | LayerMode | None = None,
    offload: Sequence[bool] | bool | None = None,
    mlp_tile: int | None = None,
    loss_tile: int | None = None,
    head_groups: int | None = None,
) -> MemoryPlan:
    """The cheapest plan within both budgets, in bytes of one rank (its share of the host's); what is given stays.

    Raises `MemoryPlanError` when nothing fits, with the largest term and the changes that would do.
    """
    count = len(sizes.layers)
    fixed = Fixed(
        layers=(layers,) * count if isinstance(layers, str) else None if layers is None else tuple(layers),
        offload=(offload,) * count if isinstance(offload, bool) else None if offload is None else tuple(offload),
        mlp_tile=mlp_tile,
        loss_tile=loss_tile,
        head_groups=head_groups,
    )
    plan = cheapest(sizes, job, device_budget, host_budget, fixed)
    if plan is None:
        miss = nearest_miss(sizes, job, host_budget, fixed)
        raise refusal(sizes, job, miss, device_budget, host_budget, fits=partial(feasible, sizes, fixed))
    return plan


def cheapest(sizes: ModelSizes, job: Job, device: int, host: int, fixed: Fixed) -> MemoryPlan | None:
    """The plan of least cost that fits; smaller pieces are tried only when no plan fits with the usual ones."""
    if not feasible(sizes, fixed, job, device, host):
        return None
    standing = sum(term.device_bytes + term.host_bytes for term in standing_terms(sizes, job))
    for pieces in (_usual(sizes, job, device, fixed), _small(sizes, job, fixed)):
        best: tuple[int, MemoryPlan] | None = None
        plans = [
            (recompute_cost(sizes, job, plan) + tile_cost(sizes, job, plan), plan)
            for plan in _candidates(sizes, job, pieces, fixed)
        ]
        for cost, plan in sorted(plans, key=lambda pair: pair[0]):
            if best is not None and cost >= best[0]:
                break
            if standing + _saved_bytes(sizes, job, plan) > device + host:
                # More than both together: nothing to look for.
                continue
            fitted = _fit(sizes, job, plan, device, host, fixed)
            if fitted is not None:
                cost += copy_cost(sizes, job, fitted)
                best = min(best or (cost, fitted), (cost, fitted), key=lambda pair: pair[0])
        if best is not None:
            return best[1]
    return None


def _saved_bytes(sizes: ModelSizes, job: Job, plan: MemoryPlan) -> int:
    """What all layers save, wherever it is kept."""
    flow, tiled = Flow.of(sizes, job, plan.head_groups), plan.mlp_tile < job.tokens
    each = {(layer, mode) for layer, mode in zip(sizes.layers, plan.layers, strict=True)}
    cost = {pair: sum(saved(flow, *pair, tiled=tiled)) for pair in each}
    return sum(cost[pair] for pair in zip(sizes.layers, plan.layers, strict=True))


def mlp_tile_for(sizes: ModelSizes, job: Job) -> int:
    """About 512 MiB of a tile's activations, forward and backward; a power of two from 2048 on."""
    width = max((3 if layer.gated else 2) * layer.width for layer in sizes.layers)
    return _tile(MLP_TILE_BYTES // (2 * width * job.compute_bytes), SMALLEST_MLP_TILE, job.tokens)


def loss_tile_for(sizes: ModelSizes, job: Job) -> int:
    """At most about 2 GiB of logits and their gradient, in fp32 where they are not compiled."""
    each = 2 * job.compute_bytes + (0 if job.fused else 17)
    return _tile(LOSS_TILE_BYTES // (each * sizes.vocabulary), SMALLEST_LOSS_TILE, job.tokens)


def head_groups_for(sizes: ModelSizes, job: Job, device: int) -> int:
    """The fewest groups whose buffers keep to their share and whose tensors can be indexed in 31 bits."""
    flows = [Flow.of(sizes, job, groups) for groups in range(1, most_groups(sizes, job.sp) + 1)]
    small = [flow for flow in flows if flow.largest_g < INDEX_LIMIT] or flows[-1:]
    modest = (flow for flow in small if group_bytes(flow) <= GROUP_SHARE * device)
    return next(modest, min(small, key=group_bytes)).groups


def _tile(tokens: int, least: int, whole: int) -> int:
    power = 1 << max(tokens, 1).bit_length() - 1
    return min(max(power, least), whole)


def _usual(sizes: ModelSizes, job: Job, device: int, fixed: Fixed) -> MemoryPlan:
    return MemoryPlan(
        _uniform("save", len(sizes.layers)),
        (False,) * len(sizes.layers),
        mlp_tile=fixed.mlp_tile or mlp_tile_for(sizes, job),
        loss_tile=fixed.loss_tile or loss_tile_for(sizes, job),
        head_groups=fixed.head_groups or head_groups_for(sizes, job, device),
    )


def _small(sizes: ModelSizes, job: Job, fixed: Fixed) -> MemoryPlan:
    usual = _usual(sizes, job, 0, fixed)
    return replace(
        usual,
        mlp_tile=fixed.mlp_tile or min(SMALLEST_MLP_TILE, job.tokens),
        loss_tile=fixed.loss_tile or min(SMALLEST_LOSS_TILE, job.tokens),
    )


def _candidates(sizes: ModelSizes, job: Job, pieces: MemoryPlan, fixed: Fixed) -> Iterator[MemoryPlan]:
    """Plans with nothing offloaded yet, each with MLP tiles from the usual one to the whole shard."""
    tiles = (pieces.mlp_tile,) if fixed.mlp_tile else _tiles(pieces.mlp_tile, job.tokens)
    for modes in dict.fromkeys(_modes(sizes, job, fixed)):
        yield from (replace(pieces, layers=modes, mlp_tile=tile) for tile in tiles)


def _tiles(usual: int, whole: int) -> tuple[int, ...]:
    """The usual tile, four times that and so on, and the whole."""
    sizes = []
    while usual < whole:
        sizes.append(usual)
        usual *= 4
    return (*sizes, whole)


def _modes(sizes: ModelSizes, job: Job, fixed: Fixed) -> Iterator[tuple[LayerMode, ...]]:
    if fixed.layers is not None:
        yield fixed.layers
        return
    count = len(sizes.layers)
    for kept in range(count + 1):
        yield _uniform("save", count - kept) + _uniform("keep", kept)
    if _rebuilds(sizes):
        yield from _rebuilding(count)
    # Attention over a window costs little to run again: such layers come first.
    order = sorted(range(count), key=lambda index: attention_flops(sizes, sizes.layers[index], job))
    for again in range(1, count + 1):
        chosen = set(order[:again])
        yield tuple("recompute" if i in chosen else "save" for i in range(count))


def _uniform(mode: LayerMode, count: int) -> tuple[LayerMode, ...]:
    return (mode,) * count


def _rebuilds(sizes: ModelSizes) -> bool:
    """Not through experts: a rebuilt input differs in its last bits and could choose others."""
    return not any(layer.experts for layer in sizes.layers)


def _rebuilding(count: int) -> Iterator[tuple[LayerMode, ...]]:
    """The first layers in chains, the others saved; then all in chains, of which the first begin with recompute.

    A longer chain holds more inputs and anchors while it is worked on. The first layers come last in backward, when
    all gradients are there, so they have the shorter chains where two lengths are used.
    """
    for k in CHAINS:
        for chained in range(k, count + 1, k):
            yield tuple("rebuild" if i < chained and i % k else "save" for i in range(count))
    for short, long in combinations((1, *CHAINS), 2):
        for turn in range(0, count + long, long):
            roots = [i for i in range(count) if not i % (short if i < turn else long)]
            for again in range(1, len(roots) + 1):
                first, kept = set(roots[:again]), set(roots[again:])
                yield tuple("recompute" if i in first else "save" if i in kept else "rebuild" for i in range(count))


def _fit(sizes: ModelSizes, job: Job, plan: MemoryPlan, device: int, host: int, fixed: Fixed) -> MemoryPlan | None:
    """`plan` with as few of its first layers offloaded as fit; None where that is too much for the host."""
    counts: Sequence[int] = range(len(plan.layers) + 1)
    if fixed.offload is not None:
        plan, counts = replace(plan, offload=fixed.offload), (0,)

    def fits(number: int) -> bool:
        return memory_of(sizes, job, _offloaded(plan, number)).device_bytes <= device

    # More layers away, fewer bytes here: the first count that fits is found by halving.
    if not fits(counts[-1]):
        return None
    index = bisect_left(counts, True, key=fits)
    fitted = _offloaded(plan, counts[index])
    return fitted if memory_of(sizes, job, fitted).host_bytes <= host else None


def _offloaded(plan: MemoryPlan, number: int) -> MemoryPlan:
    """`number` layers more away, the first ones; 0 leaves the plan as it is."""
    if not number:
        return plan
    return replace(plan, offload=tuple(i < number and mode != "keep" for i, mode in enumerate(plan.layers)))


def _smallest(sizes: ModelSizes, job: Job, fixed: Fixed) -> Iterator[MemoryPlan]:
    """The plans that can be smallest: one tensor a layer saved, or, for few layers or tokens, least work at once."""
    pieces, count = _small(sizes, job, fixed), len(sizes.layers)
    if fixed.layers is not None:
        yield replace(pieces, layers=fixed.layers)
        return
    modes: tuple[LayerMode, ...] = ("recompute", "save", "keep")
    for mode in modes:
        yield replace(pieces, layers=_uniform(mode, count))
    for k in CHAINS if _rebuilds(sizes) else ():
        yield replace(pieces, layers=tuple("rebuild" if i % k else "recompute" for i in range(count)))


def feasible(sizes: ModelSizes, fixed: Fixed, job: Job, device: int, host: int) -> bool:
    """Whether any plan fits, without looking for the best."""
    return any(_fit(sizes, job, plan, device, host, fixed) is not None for plan in _smallest(sizes, job, fixed))


def nearest_miss(sizes: ModelSizes, job: Job, host: int, fixed: Fixed) -> Memory:
    """The least device memory that can be had, with as many layers away as the host takes."""
    misses: list[Memory] = []
    for plan in _smallest(sizes, job, fixed):
        if fixed.offload is not None:
            misses.append(memory_of(sizes, job, replace(plan, offload=fixed.offload)))
            continue
        counts = range(len(plan.layers) + 1)
        each = [memory_of(sizes, job, _offloaded(plan, number)) for number in counts]
        misses.append(next((memory for memory in reversed(each) if memory.host_bytes <= host), each[0]))
    return min(misses, key=lambda memory: memory.device_bytes)
