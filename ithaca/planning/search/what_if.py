"""What would be different with other means: longer with one more GPU, fitting at all with more memory.

Nothing is guessed: every change named here was tried on the same model of memory and fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ithaca.constants import CARDS_PER_NODE
from ithaca.errors import MemoryPlanError, MeshError
from ithaca.planning.machine.hardware import DEVICES
from ithaca.planning.search.advice import smallest
from ithaca.planning.search.best_mesh import Option, best_options
from ithaca.planning.search.longest import fits_any, longest_length, miss
from ithaca.planning.search.meshes import all_degrees
from ithaca.planning.search.request import LEAST_HEADROOM, Wanted
from ithaca.planning.terms.traffic import Machine
from ithaca.quantities import show_bytes, show_part

# The most nodes and the most host memory of one (bytes) worth naming; how many cards a node has.
MOST_NODES, MOST_HOST = 64, 4 * 10**12
LORA_RANK = 16
# By how much more cards may give beyond their share, since layers that were run again are kept.
SUPERLINEAR = 0.25
# Shares of the host left free that may be proposed, the most first.
_LESS_LEFT = (0.2, 0.15, 0.1, LEAST_HEADROOM)


def show_length(tokens: int) -> str:
    """As it is written on the command line, 512k or 1.5M; the number itself where that would not be exact."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size and tokens * 100 % size == 0:
            return f"{tokens / size:g}{unit}"
    return str(tokens)


def show_gpus(machine: Machine, instead: Machine | None = None) -> str:
    """The same of a machine: `--gpus 8xH100 --nodes 2`; one node too is written where it stands for several."""
    nodes = f" --nodes {machine.nodes}" if machine.nodes > 1 or (instead is not None and instead.nodes > 1) else ""
    return f"--gpus {machine.gpus}x{machine.device.name}{nodes}"


def show_used(machine: Machine, used: Machine) -> str:
    """Which of a machine's GPUs a plan leaves idle, if any: ` on 8 of 9 GPUs`."""
    if used.world == machine.world:
        return ""
    each = f", {used.gpus} in each of {used.nodes} nodes" if used.nodes > 1 else ""
    return f" on {used.world} of {machine.world} GPUs{each}"


def gains(wanted: Wanted, now: int) -> list[tuple[str, int]]:
    """How long a row could be with a little more of one thing, where it can be `now`; what was asked for stays."""
    machine = wanted.machine
    if machine.nodes > 1:
        more = ("one more node", replace(machine, nodes=machine.nodes + 1))
    else:
        more = ("one more GPU on the same host", replace(machine, gpus=machine.gpus + 1))
    twice = _times(machine, 2)
    shared = " on the same host" if twice.nodes == 1 and not machine.usual_host else ""
    tried = (
        more,
        (f"twice the GPUs{shared}", twice),
        ("twice the host memory", replace(machine, host_memory=2 * machine.host_memory)),
    )
    # With more there is at least what there was: what cannot be cut as was asked for is left idle.
    return [(label, longest_length(replace(wanted, machine=other), known=now)) for label, other in tried]


def machine_for(wanted: Wanted, now: Option, target: float) -> tuple[Machine, str] | None:
    """The fewest cards like these that give `target` tokens a second where `now` gives fewer, and in words what else is
    to change; None where none do."""
    # Fewer than their share of the target cannot do.
    least, length = wanted.machine.world * target / now.time.tokens_per_second, now.job.length
    numbers = [n for n in _cards(wanted.machine) if n >= (1 - SUPERLINEAR) * least]
    for free, words in _freed(wanted):
        for number in numbers:
            machine = _of(wanted.machine, number)
            options = best_options(replace(free, machine=machine), length)
            if options and options[0].time.tokens_per_second >= target:
                return machine, words
    return None


def _freed(wanted: Wanted) -> Iterator[tuple[Wanted, str]]:
    """What was asked for; then without the cut and the rows that were, with the words that say so."""
    yield wanted, ""
    if given := [name for name, value in (("--sp", wanted.sp), ("--batch", wanted.batch)) if value is not None]:
        yield replace(wanted, sp=None, batch=None), f" without {' and '.join(given)}"


def refusal(wanted: Wanted, length: int) -> MemoryPlanError | MeshError:
    """The error for a length that no plan fits: the term to blame and the smallest changes of one kind that fit."""
    nearest = miss(wanted, length)
    if nearest is None:
        return _no_cut(wanted)
    (used, degrees), recipe, memory = nearest
    device, host = used.budgets
    short = memory.host_bytes / host > memory.device_bytes / device
    blame = memory.largest(host=short)
    size = blame.host_bytes if short else blame.device_bytes
    tried = list(_changes(wanted, length))
    advice = "any one of these fits: " + "; ".join(tried) if tried else "no single change that was tried fits"
    if degrees.sp == wanted.sizes.heads:
        advice += f". More than {degrees.sp} ranks, one a head, need a ring, which is not built yet"
    cut = f"{degrees}{show_used(wanted.machine, used.machine)}"
    return MemoryPlanError(
        f"{length:,} tokens do not fit {wanted.machine}: cut as {cut}, with {recipe}, the smallest plan takes "
        f"{show_part(memory.device_bytes, device)} on each GPU and {show_part(memory.host_bytes, host)} of host memory for each "
        f"({_headroom(wanted)}), worst at the {memory.moment}. "
        f"The largest term is {blame.name!r}, {show_bytes(size, 1)} ({blame.formula}); {advice}"
    )


def _headroom(wanted: Wanted) -> str:
    alike = wanted.host_headroom == wanted.headroom
    return f"headroom {wanted.headroom:.0%}" + ("" if alike else f", of the host {wanted.host_headroom:.0%}")


def _changes(wanted: Wanted, length: int) -> Iterator[str]:
    """Changes of one kind each, as they are typed; what was asked for stays unless the words say otherwise."""
    machine = wanted.machine
    for free, _ in list(_freed(wanted))[1:]:
        if fits_any(free, length):
            yield f"leave {_given(sp=wanted.sp, batch=wanted.batch)} to the plan"
    if any((wanted.optimizer, wanted.precision, wanted.on_host is not None)):
        freer = replace(wanted, optimizer=None, precision=None, on_host=None)
        if fits_any(freer, length):
            yield f"leave {_given(optimizer=wanted.optimizer, precision=wanted.precision) or 'the place'} to the plan"
    for left in _LESS_LEFT:
        if left < wanted.host_headroom and fits_any(replace(wanted, host_left=left), length):
            yield f"--host-headroom {left:g}"
            break
    step = 64 * 10**9
    host = smallest(
        machine.host_memory // step + 1, MOST_HOST // step, lambda n: fits_any(_hosted(wanted, n * step), length)
    )
    if host:
        yield f"--host-memory {host * step // 10**9}GB a node"
    yield from _more_cards(wanted, length)
    if best := longest_length(wanted):
        yield f"--length {show_length(best)}"
    if not wanted.sizes.adapters and fits_any(replace(wanted, sizes=wanted.sizes.with_lora(LORA_RANK)), length):
        yield "--tune lora"
    larger = [device for device in DEVICES if device.memory > machine.device.memory]
    for device in sorted(larger, key=lambda device: device.memory):
        other = machine.with_cards(machine.gpus, machine.nodes, device)
        if fits_any(replace(wanted, machine=other), length):
            yield show_gpus(other, machine)
            return


def _more_cards(wanted: Wanted, length: int) -> Iterator[str]:
    """The fewest more cards like these; only where none do with what was asked for, without it and saying so."""
    machine = wanted.machine
    for free, words in _freed(wanted):
        for number in (n for n in _cards(machine) if n > machine.world):
            other = _of(machine, number)
            if fits_any(replace(free, machine=other), length):
                same = (
                    "" if machine.usual_host else f", {machine.host_memory / 1e9:,.0f} GB of host memory a node as now"
                )
                yield show_gpus(other, machine) + words + same
                return


def _given(**options: object) -> str:
    return " and ".join(f"--{name}" for name, value in options.items() if value is not None)


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


def _cards(machine: Machine) -> Iterator[int]:
    """Numbers of cards to try: a node's by doubling, then whole nodes."""
    node = max(CARDS_PER_NODE, machine.gpus)
    yield from (n for n in (1, 2, 4) if n < node)
    yield from (node * nodes for nodes in range(1, 9))
    yield from (node * nodes for nodes in (10, 12, 16, 24, 32, 48, MOST_NODES))


def _of(machine: Machine, cards: int) -> Machine:
    """`cards` cards of this kind in nodes as large as usual."""
    gpus = min(cards, max(CARDS_PER_NODE, machine.gpus))
    return machine.with_cards(gpus, cards // gpus)


def _times(machine: Machine, factor: int) -> Machine:
    if machine.nodes > 1 or machine.gpus * factor > CARDS_PER_NODE:
        return replace(machine, nodes=factor * machine.nodes)
    return machine.with_cards(factor * machine.gpus, 1)
