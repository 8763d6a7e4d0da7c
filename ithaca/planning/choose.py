"""The plan with the least work done again that fits the device and the host.

Candidates run from "keep everything" to "recompute everything"; each is offloaded no further than it must be, from
the first layers on, whose tensors are needed last. Layers are kept whole only where nothing is offloaded: pinning
tens of GiB to spare a percent of a step is a bad trade. Of the candidates that fit, the cheapest by `cost` wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ithaca.planning.activations import Flow, attention_work, most_groups
from ithaca.planning.advice import refusal
from ithaca.planning.cost import attention_flops, copy_cost, recompute_cost
from ithaca.planning.memory import Memory, memory_of
from ithaca.planning.plan import Job, LayerMode, MemoryPlan
from ithaca.planning.sizes import ModelSizes

# Chains of rebuilt inputs: every k-th layer saves its own.
CHAINS = (2, 4)
# A head group's buffers and workspace take at most this share of the device.
GROUP_SHARE = 0.05
# No kernel tensor reaches this many elements.
INDEX_LIMIT = 2**31
MLP_TILE_BYTES = 512 * 2**20
LOSS_TILE_BYTES = 2**30
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
    """The cheapest plan within both budgets, in bytes; what is given is kept as given.

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
        smallest = min(_least(sizes, job, fixed), key=lambda m: _excess(m, device_budget, host_budget))
        raise refusal(
            sizes,
            job,
            smallest,
            device_budget,
            host_budget,
            fits=lambda job, device, host: cheapest(sizes, job, device, host, fixed) is not None,
        )
    return plan


def cheapest(sizes: ModelSizes, job: Job, device: int, host: int, fixed: Fixed) -> MemoryPlan | None:
    """The plan of least cost that fits; smaller pieces are tried only when no plan fits with the usual ones."""
    for pieces in (_usual(sizes, job, device, fixed), _small(sizes, job, fixed)):
        best: tuple[int, MemoryPlan] | None = None
        plans = [plan for plan in _candidates(sizes, job, pieces, fixed) if plan is not None]
        for cost, plan in sorted(((recompute_cost(sizes, job, plan), plan) for plan in plans), key=lambda pair: pair[0]):
            if best is not None and cost >= best[0]:
                break
            fitted = _fit(sizes, job, plan, device, host, fixed)
            if fitted is not None:
                cost += copy_cost(sizes, job, fitted)
                best = min(best or (cost, fitted), (cost, fitted), key=lambda pair: pair[0])
        if best is not None:
            return best[1]
    return None


def mlp_tile_for(sizes: ModelSizes, job: Job) -> int:
    """About 512 MiB of a tile's activations, forward and backward; a power of two from 2048 on."""
    width = max((3 if layer.gated else 2) * layer.width for layer in sizes.layers)
    return _tile(MLP_TILE_BYTES // (2 * width * job.compute_bytes), SMALLEST_MLP_TILE, job.tokens)


def loss_tile_for(sizes: ModelSizes, job: Job) -> int:
    """At most about 1 GiB of logits in fp32."""
    return _tile(LOSS_TILE_BYTES // (4 * sizes.vocabulary), SMALLEST_LOSS_TILE, job.tokens)


def head_groups_for(sizes: ModelSizes, job: Job, device: int) -> int:
    """The fewest groups whose buffers keep to their share and whose tensors can be indexed in 31 bits."""
    most = most_groups(sizes, job.sp)
    for groups in range(1, most + 1):
        flow = Flow.of(sizes, job, groups)
        names = ("head group", "exchange", "kernel's gradients", "kernel workspace")
        work = sum(piece.bytes for piece in attention_work(flow, "save") if piece.name in names)
        if work <= GROUP_SHARE * device and flow.largest_g < INDEX_LIMIT:
            return groups
    return most


def _tile(tokens: int, least: int, whole: int) -> int:
    power = 1 << max(tokens, 1).bit_length() - 1
    return min(max(power, least), whole)


def _usual(sizes: ModelSizes, job: Job, device: int, fixed: Fixed) -> MemoryPlan:
    return MemoryPlan(
        ("save",) * len(sizes.layers),
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
    """Plans with nothing offloaded yet."""
    if fixed.layers is not None:
        yield replace(pieces, layers=fixed.layers)
        return
    count = len(sizes.layers)
    tiles = {pieces.mlp_tile} if fixed.mlp_tile else {pieces.mlp_tile, job.tokens}
    for kept in range(1, count + 1):
        for tile in tiles:
            yield replace(pieces, layers=_last(kept, "keep", count), mlp_tile=tile)
    yield pieces
    for modes in _rebuilding(count):
        yield replace(pieces, layers=modes)
    # Attention over a window costs little to run again: such layers come first.
    order = sorted(range(count), key=lambda index: attention_flops(sizes, sizes.layers[index], job))
    for again in range(1, count + 1):
        chosen = set(order[:again])
        yield replace(pieces, layers=tuple("recompute" if i in chosen else "save" for i in range(count)))


def _last(number: int, mode: LayerMode, count: int) -> tuple[LayerMode, ...]:
    rest: tuple[LayerMode, ...] = ("save",) * (count - number)
    return (*rest, *(mode,) * number)


def _rebuilding(count: int) -> Iterator[tuple[LayerMode, ...]]:
    """The first layers in chains of 2 or 4, the others saved; then all in chains, of which some begin with recompute."""
    for k in CHAINS:
        for chained in range(k, count + 1, k):
            yield tuple("rebuild" if i < chained and i % k else "save" for i in range(count))
        for again in range(k, count + 1, k):
            yield tuple("rebuild" if i % k else "recompute" if i < again else "save" for i in range(count))


def _fit(sizes: ModelSizes, job: Job, plan: MemoryPlan, device: int, host: int, fixed: Fixed) -> MemoryPlan | None:
    """`plan` with as few of its first layers offloaded as fit, None where none or all of them do not."""

    def fits(number: int) -> bool:
        return memory_of(sizes, job, _offloaded(plan, number)).device_bytes <= device

    if fixed.offload is not None:
        plan = replace(plan, offload=fixed.offload)
        number = 0
    elif fits(0):
        number = 0
    elif "keep" in plan.layers and fixed.layers is None:
        return None
    else:
        number = _fewest(len(plan.layers), fits)
    plan = _offloaded(plan, number) if number else plan
    memory = memory_of(sizes, job, plan)
    return plan if memory.device_bytes <= device and memory.host_bytes <= host else None
