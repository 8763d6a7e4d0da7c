"""What would be different with other means: longer with one more GPU, fitting at all with more memory.

Nothing is guessed: every change named here was tried on the same model of memory and fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ithaca.errors import MemoryPlanError, MeshError
from ithaca.planning.advice import largest, smallest
from ithaca.planning.hardware import DEVICES, GIB
from ithaca.planning.mesh_search import (
    STEP,
    Option,
    Wanted,
    all_degrees,
    best_options,
    fits,
    longest_of_all,
    miss,
    recipes,
)
from ithaca.planning.traffic import Machine

# The most nodes and the most host memory of one (bytes) worth naming; how many cards a node has.
MOST_NODES, MOST_HOST, NODE = 64, 4 * 10**12, 8
LORA_RANK = 16
# By how much more cards may give beyond their share, since layers that were run again are kept.
SUPERLINEAR = 0.25


def show_length(tokens: int) -> str:
    """As it is written on the command line, 512k or 1.5M; the number itself where that would not be exact."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size and tokens * 100 % size == 0:
            return f"{tokens / size:g}{unit}"
    return str(tokens)


def show_gpus(machine: Machine) -> str:
    """The same of a machine: `--gpus 8xH100 --nodes 2`."""
    nodes = f" --nodes {machine.nodes}" if machine.nodes > 1 else ""
    return f"--gpus {machine.gpus}x{machine.device.name}{nodes}"


def gains(wanted: Wanted) -> list[tuple[str, int]]:
    """How long a row could be with a little more of one thing; the mesh is chosen anew."""
    machine = wanted.machine
    if machine.nodes > 1:
        more = ("one more node", replace(machine, nodes=machine.nodes + 1))
    else:
        more = ("one more GPU on the same host", replace(machine, gpus=machine.gpus + 1))
    tried = (
        more,
        ("twice the GPUs", _times(machine, 2)),
        ("twice the host memory", replace(machine, host_memory=2 * machine.host_memory)),
    )
    found = [(label, longest_of_all(replace(wanted, machine=other, sp=None, batch=None))) for label, other in tried]
    return [(label, best[0]) for label, best in found if best is not None]


def machine_for(wanted: Wanted, now: Option, target: float) -> Machine | None:
    """The fewest cards like these that give `target` tokens a second where `now` gives fewer; None where none do."""
    # Fewer than their share of the target cannot do.
    least, length = wanted.machine.world * target / now.time.tokens_per_second, now.job.length
    for number in (n for n in _cards(wanted.machine) if n >= (1 - SUPERLINEAR) * least):
        machine = _of(wanted.machine, number)
        options = best_options(replace(wanted, machine=machine, sp=None), length)
        if options and options[0].time.tokens_per_second >= target:
            return machine
    return None


def refusal(wanted: Wanted, length: int) -> MemoryPlanError | MeshError:
    """The error for a length that no plan fits: the term to blame and the smallest changes of one kind that fit."""
    nearest = miss(wanted, length)
    if nearest is None:
        return _no_cut(wanted)
    degrees, recipe, memory = nearest
    device, host = wanted.budgets
    short = memory.host_bytes / host > memory.device_bytes / device
    blame = memory.largest(host=short)
    size = blame.host_bytes if short else blame.device_bytes
    tried = list(_changes(wanted, length))
    advice = "any one of these fits: " + "; ".join(tried) if tried else "no single change that was tried fits"
    if degrees.sp == wanted.sizes.heads:
        advice += f". More than {degrees.sp} ranks, one a head, need a ring, which is not built yet"
    return MemoryPlanError(
        f"{length:,} tokens do not fit {wanted.machine}: cut as {degrees}, with {recipe}, the smallest plan takes "
        f"{memory.device_bytes / GIB:.1f} of {device / GIB:.1f} GiB on each GPU and {memory.host_bytes / GIB:.1f} of "
        f"{host / GIB:.1f} GiB of host memory for each (headroom {wanted.headroom:.0%}), worst at the {memory.moment}. "
        f"The largest term is {blame.name!r}, {size / GIB:.1f} GiB ({blame.formula}); {advice}"
    )


def fits_any(wanted: Wanted, length: int) -> bool:
    """Whether anything fits that runs."""
    cuts = all_degrees(wanted)[-1:]
    return any(fits(wanted, length, cut, recipe) for group in recipes(wanted) for recipe in group for cut in cuts)


def _changes(wanted: Wanted, length: int) -> Iterator[str]:
    machine, free = wanted.machine, replace(wanted, sp=None, batch=None)
    if (wanted.sp or wanted.batch) and fits_any(free, length):
        yield "leave --sp and --batch to the plan"
    if any((wanted.optimizer, wanted.precision, wanted.on_host is not None)):
        freer = replace(wanted, optimizer=None, precision=None, on_host=None)
        if fits_any(freer, length):
            yield "leave optimizer, precision and place to the plan"
    step = 64 * 10**9
    host = smallest(
        machine.host_memory // step + 1, MOST_HOST // step, lambda n: fits_any(_hosted(wanted, n * step), length)
    )
    if host:
        yield f"--host-memory {host * step // 10**9}GB a node"
    more = next((n for n in _cards(machine) if n > machine.world and fits_any(_with(free, n), length)), None)
    if more:
        yield show_gpus(_of(machine, more))
    steps = largest(min(length, 2**28) // STEP, lambda n: fits_any(wanted, n * STEP))
    if steps:
        yield f"--length {show_length(steps * STEP)}"
    if not wanted.sizes.adapters and fits_any(replace(wanted, sizes=wanted.sizes.with_lora(LORA_RANK)), length):
        yield "--tune lora"
    larger = [device for device in DEVICES if device.memory > machine.device.memory]
    for device in sorted(larger, key=lambda device: device.memory):
        if fits_any(replace(wanted, machine=replace(machine, device=device)), length):
            yield show_gpus(replace(machine, device=device))
            return


def _no_cut(wanted: Wanted) -> MeshError:
    world, heads = wanted.machine.world, wanted.sizes.heads
    works = [str(cut.sp) for cut in all_degrees(replace(wanted, sp=None, batch=None))]
    if wanted.sp is not None and str(wanted.sp) not in works:
        return MeshError(
            f"sp={wanted.sp} over {world} GPUs and {heads} heads: a divisor of the GPUs, at most one a head, is needed: "
            f"{', '.join(works)}"
        )
    rows = sorted({cut.dp for cut in all_degrees(replace(wanted, batch=None))})
    return MeshError(
        f"batch={wanted.batch} over {world} GPUs: every sequence group takes as many rows, so a multiple of the number "
        f"of groups is needed, and there can be {', '.join(map(str, rows))}"
    )


def _hosted(wanted: Wanted, host_memory: int) -> Wanted:
    return replace(wanted, machine=replace(wanted.machine, host_memory=host_memory))


def _with(wanted: Wanted, cards: int) -> Wanted:
    return replace(wanted, machine=_of(wanted.machine, cards))


def _cards(machine: Machine) -> Iterator[int]:
    """Numbers of cards to try: a node's by doubling, then whole nodes."""
    node = max(NODE, machine.gpus)
    yield from (n for n in (1, 2, 4) if n < node)
    yield from (node * nodes for nodes in range(1, 9))
    yield from (node * nodes for nodes in (10, 12, 16, 24, 32, 48, MOST_NODES))


def _of(machine: Machine, cards: int) -> Machine:
    """`cards` cards of this kind in nodes as large as usual, each with the host memory this one has for a card."""
    gpus = min(cards, max(NODE, machine.gpus))
    return replace(machine, gpus=gpus, nodes=cards // gpus, host_memory=machine.host_memory // machine.gpus * gpus)


def _times(machine: Machine, factor: int) -> Machine:
    whole = machine.nodes > 1 or machine.gpus * factor > NODE
    return replace(machine, nodes=factor * machine.nodes) if whole else _of(machine, factor * machine.gpus)
