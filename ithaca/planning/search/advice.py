"""Advice where a job does not fit, and lengths within reach of a larger machine.

Two doors ask: a job on the ranks there are (`plan_or_refuse`), and a length on a machine to be planned for (`refusal`).
Both errors name the largest term and the smallest changes of one kind that fit, in the words of who asks.

Invariant: no change is guessed: every change named here was tried on the same model of memory and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from ithaca.constants import CARDS_PER_NODE, GIB
from ithaca.errors import MemoryPlanError, MeshError
from ithaca.planning.machine.hardware import DEVICES
from ithaca.planning.memory_plan import NO_DECISIONS, Decisions, Job, MemoryPlan
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.best_mesh import Option, best_options
from ithaca.planning.search.bisection import largest, smallest
from ithaca.planning.search.choose import choose_plan, feasible, nearest_miss
from ithaca.planning.search.longest import STEP, closest_plan_that_does_not_fit, fits_any, longest_length
from ithaca.planning.search.meshes import all_degrees
from ithaca.planning.search.phrases import LIBRARY, Phrases, show_gpus, show_length, show_used
from ithaca.planning.search.request import LEAST_HEADROOM, PlanRequest
from ithaca.planning.terms.step_memory import StepMemory
from ithaca.planning.terms.traffic import Machine
from ithaca.quantities import show_bytes, show_part

# The most memory of a device, of one rank's host and of a node's host, and the most nodes, that are worth naming.
MOST_DEVICE, MOST_HOST, MOST_NODE_HOST, MOST_NODES = 512 * GIB, 4096 * GIB, 4 * 10**12, 64
# Host memory of a node is proposed in steps of this many bytes.
HOST_STEP = 64 * 10**9
LORA_RANK = 16
# By this share more cards may give beyond their number, since layers that were run again are kept.
SUPERLINEAR = 0.25
# Shares of the host left free that may be proposed, the most first.
_LESS_LEFT = (0.2, 0.15, 0.1, LEAST_HEADROOM)

Fits = Callable[[Job, int, int], bool]


def plan_or_refuse(
    sizes: ModelSizes,
    job: Job,
    device: int,
    host: int = 0,
    decided: Decisions = NO_DECISIONS,
    *,
    phrases: Phrases = LIBRARY,
) -> MemoryPlan:
    """Return the cheapest plan within `device` and `host` bytes of one rank.

    Raises `MemoryPlanError` if no plan fits, with the largest term and the changes that fit, in these `phrases`.
    """
    plan = choose_plan(sizes, job, device, host, decided)
    if plan is not None:
        return plan
    decided = decided.for_layers(len(sizes.layers))
    memory = nearest_miss(sizes, job, host, decided)
    changes = list(_job_changes(sizes, job, device, host, decided, phrases))
    raise MemoryPlanError(
        f"{job.length:,} tokens over sp={job.sp} do not fit: the smallest plan takes "
        f"{show_part(memory.device_bytes, device)} on the device and {show_part(memory.host_bytes, host)} on the host, worst at "
        f"the {memory.moment}. {_blame(memory, on_host=memory.host_bytes > host)}; {_any_of(changes)}"
    )


def refusal(request: PlanRequest, length: int) -> MemoryPlanError | MeshError:
    """Return the error for a length that no plan fits, with changes as options of `ithaca plan`."""
    nearest = closest_plan_that_does_not_fit(request, length)
    if nearest is None:
        return _no_mesh_error(request)
    (used, degrees), recipe, memory = nearest
    device, host = used.budgets
    on_host = memory.host_bytes / host > memory.device_bytes / device
    advice = _any_of(list(_request_changes(request, length)) or _two_changes(request))
    if degrees.sp == request.sizes.heads:
        advice += f". More than {degrees.sp} ranks, one a head, need a ring, which is not built yet"
    left = f"headroom {request.headroom:.0%}"
    left += "" if request.host_headroom == request.headroom else f", of the host {request.host_headroom:.0%}"
    return MemoryPlanError(
        f"{length:,} tokens do not fit {request.machine}: cut as {degrees}{show_used(request.machine, used.machine)}, with "
        f"{recipe}, the smallest plan takes {show_part(memory.device_bytes, device)} on each GPU and "
        f"{show_part(memory.host_bytes, host)} of host memory for each ({left}), worst at the {memory.moment}. "
        f"{_blame(memory, on_host=on_host)}; {advice}"
    )


def _blame(memory: StepMemory, *, on_host: bool) -> str:
    term = memory.largest(host=on_host)
    size = term.host_bytes if on_host else term.device_bytes
    return f"The largest term is {term.name!r}, {show_bytes(size, 1)} ({term.formula})"


def _any_of(changes: Iterable[str]) -> str:
    changes = list(changes)
    return "any one of these fits: " + "; ".join(changes) if changes else "no single change that was tried fits"


def _job_changes(
    sizes: ModelSizes, job: Job, device: int, host: int, decided: Decisions, phrases: Phrases
) -> Iterator[str]:
    """Yield changes of one kind each that make a job fit, the cheapest first."""
    fits: Fits = partial(feasible, sizes, decided)
    if decided.names and feasible(sizes, NO_DECISIONS, job, device, host):
        yield phrases.free(decided.names)
    yield from _to_host(job, device, host, fits, phrases)
    for wider in _jobs_with_larger_sp(job, sizes.heads):
        if fits(wider, device, host):
            yield phrases.sp(wider.sp)
            break
    steps = largest(1, job.length // STEP, lambda step: fits(replace(job, length=step * STEP), device, host))
    if steps:
        yield phrases.length(steps * STEP)
    larger = smallest(device // GIB + 1, MOST_DEVICE // GIB, lambda gib: fits(job, gib * GIB, host))
    if larger:
        yield phrases.device(larger)


def _to_host(job: Job, device: int, host: int, fits: Fits, phrases: Phrases) -> Iterator[str]:
    """Yield more of the host for saved tensors or, where that does not fit, for everything."""
    if phrases.host is None:
        return
    ways = [("", job)]
    if phrases.on_host is not None:
        moved = replace(job, weights_on_host=True, gradients_on_host=True, optimizer_on_host=True)
        ways.append((f"{phrases.on_host} (weights, gradients and optimizer state)", moved))
    for name, changed in ways:

        def works(gib: int, changed: Job = changed) -> bool:
            return fits(changed, device, gib * GIB)

        # The amount is named only where it is more than the host has.
        needed = smallest(host // GIB, MOST_HOST // GIB, works)
        if needed is not None:
            amount = phrases.host(needed)
            yield name if needed <= host // GIB else f"{name}, with {amount}" if name else amount
            return


def _jobs_with_larger_sp(job: Job, heads: int) -> Iterator[Job]:
    """Yield the job over twice the ranks a row, four times and so on: of the ranks there are, or of as many as needed."""
    sp, ranks = job.sp, job.world // job.ring
    while (sp := 2 * sp) <= heads:
        dp = max(1, ranks // sp)
        if (ranks % sp == 0 or sp > ranks) and sp * dp * job.ring % job.replicas == 0:
            yield replace(job, sp=sp, dp=dp, accumulate=job.accumulate or dp < job.dp)


def _request_changes(request: PlanRequest, length: int) -> Iterator[str]:
    """Yield changes of one kind each that make a length fit; the rest of the request stays unless the words say so."""
    machine = request.machine
    for free, _ in list(_requests_without_fixed_choices(request))[1:]:
        if fits_any(free, length):
            yield f"leave {_options(sp=request.sp, batch=request.batch)} to the plan"
    numerics = any((request.optimizer, request.precision, request.on_host is not None))
    if numerics and fits_any(replace(request, optimizer=None, precision=None, on_host=None), length):
        yield f"leave {_options(optimizer=request.optimizer, precision=request.precision) or 'the place'} to the plan"
    for left in _LESS_LEFT:
        if left < request.host_headroom and fits_any(replace(request, host_left=left), length):
            yield f"--host-headroom {left:g}"
            break

    def hosted(steps: int) -> bool:
        larger = replace(machine, host_memory=steps * HOST_STEP)
        return fits_any(replace(request, machine=larger), length)

    if host := smallest(machine.host_memory // HOST_STEP + 1, MOST_NODE_HOST // HOST_STEP, hosted):
        yield f"--host-memory {host * HOST_STEP // 10**9}GB a node"
    yield from _more_cards(request, length)
    if best := longest_length(request):
        yield f"--length {show_length(best)}"
    if not request.sizes.adapters and fits_any(replace(request, sizes=request.sizes.with_lora(LORA_RANK)), length):
        yield "--tune lora"
    larger = [device for device in DEVICES if device.memory > machine.device.memory]
    for device in sorted(larger, key=lambda device: device.memory):
        other = machine.with_cards(machine.gpus, machine.nodes, device)
        if fits_any(replace(request, machine=other), length):
            yield show_gpus(other, machine)
            return


def _more_cards(request: PlanRequest, length: int) -> Iterator[str]:
    """Yield the fewest more cards like these that fit; only if none do with the whole request, without sp and rows."""
    machine = request.machine
    for free, words in _requests_without_fixed_choices(request):
        for number in (n for n in _cards(machine) if n > machine.world):
            other = _of_cards(machine, number)
            if fits_any(replace(free, machine=other), length):
                same = f", {machine.host_memory / 1e9:,.0f} GB of host memory a node as now"
                yield show_gpus(other, machine) + words + ("" if machine.usual_host else same)
                return


def _two_changes(request: PlanRequest) -> Iterator[str]:
    """Yield more cards together with a shorter row, where neither helps alone: the longest row on the most cards tried."""
    other = _of_cards(request.machine, max(_cards(request.machine)))
    for free, words in _requests_without_fixed_choices(request):
        if best := longest_length(replace(free, machine=other)):
            yield f"{show_gpus(other, request.machine)} --length {show_length(best)}{words}"
            return


def _requests_without_fixed_choices(request: PlanRequest) -> Iterator[tuple[PlanRequest, str]]:
    """Yield the request, and the request without its sp and batch, with the words that say so."""
    yield request, ""
    if given := [name for name, value in (("--sp", request.sp), ("--batch", request.batch)) if value is not None]:
        yield replace(request, sp=None, batch=None), f" without {' and '.join(given)}"


def _options(**options: object) -> str:
    return " and ".join(f"--{name}" for name, value in options.items() if value is not None)


def _no_mesh_error(request: PlanRequest) -> MeshError:
    world, heads = request.machine.world, request.sizes.heads
    works = [str(shape.sp) for shape in all_degrees(replace(request, sp=None, batch=None))]
    if request.sp is not None and str(request.sp) not in works:
        return MeshError(
            f"sp={request.sp} over {world} GPUs and {heads} heads: a divisor of the GPUs, at most one a head, is needed: "
            f"{', '.join(works)}"
        )
    rows = sorted({shape.dp for shape in all_degrees(replace(request, batch=None))})
    return MeshError(
        f"batch={request.batch} over {world} GPUs: every sequence group takes as many rows, so a multiple of the number "
        f"of groups is needed, and there can be {', '.join(map(str, rows))}"
    )


def gains(request: PlanRequest, now: int) -> list[tuple[str, int]]:
    """Return the longest row with a little more of one thing, where it is `now` with the machine as it is."""
    machine = request.machine
    if machine.nodes > 1:
        more = ("one more node", replace(machine, nodes=machine.nodes + 1))
    else:
        more = ("one more GPU on the same host", replace(machine, gpus=machine.gpus + 1))
    if machine.nodes > 1 or machine.gpus * 2 > CARDS_PER_NODE:
        twice = replace(machine, nodes=2 * machine.nodes)
    else:
        twice = machine.with_cards(2 * machine.gpus, 1)
    shared = " on the same host" if twice.nodes == 1 and not machine.usual_host else ""
    tried = (
        more,
        (f"twice the GPUs{shared}", twice),
        ("twice the host memory", replace(machine, host_memory=2 * machine.host_memory)),
    )
    # A larger machine reaches at least `now`: GPUs that the request cannot use are left idle.
    return [(label, longest_length(replace(request, machine=other), known=now)) for label, other in tried]


def machine_for(request: PlanRequest, now: Option, target: float) -> tuple[Machine, str] | None:
    """Return the fewest cards like these that reach `target` tokens a second, and the words for what else must change.

    None if no number of cards that is tried reaches the target, which `now` misses.
    """
    # Cards below their share of the target cannot reach it.
    least, length = request.machine.world * target / now.time.tokens_per_second, now.job.length
    numbers = [n for n in _cards(request.machine) if n >= (1 - SUPERLINEAR) * least]
    for free, words in _requests_without_fixed_choices(request):
        for number in numbers:
            machine = _of_cards(request.machine, number)
            options = best_options(replace(free, machine=machine), length)
            if options and options[0].time.tokens_per_second >= target:
                return machine, words
    return None


def _cards(machine: Machine) -> Iterator[int]:
    """Yield the numbers of cards to try: those of a node by doubling, then whole nodes."""
    node = max(CARDS_PER_NODE, machine.gpus)
    yield from (n for n in (1, 2, 4) if n < node)
    yield from (node * nodes for nodes in (*range(1, 9), 10, 12, 16, 24, 32, 48, MOST_NODES))


def _of_cards(machine: Machine, cards: int) -> Machine:
    """Return `cards` cards of this kind in nodes as large as usual."""
    gpus = min(cards, max(CARDS_PER_NODE, machine.gpus))
    return machine.with_cards(gpus, cards // gpus)
