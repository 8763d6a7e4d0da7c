"""Text about memory: a plan's terms as a table, and what to change when nothing fits.

`refusal` does not guess: every change it names was tried on the same model of memory and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ithaca.constants import GIB
from ithaca.errors import MemoryPlanError
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.plan import Job
from ithaca.planning.terms.memory_terms import Memory, Term
from ithaca.quantities import memory_unit, show_bytes, show_part

Fits = Callable[[Job, int, int], bool]
BAR = 24
# Lengths are proposed in steps of this many tokens; memory in steps of one GiB, up to the largest worth naming.
STEP = 1024
MOST_HOST, MOST_DEVICE = 4096 * GIB, 512 * GIB


class Words(NamedTuple):
    """How a change is asked for: by arguments of the library, or as a command has them. `host` and `device` are given the
    GiB that a plan would have to be given there, `budget` an amount such as `38.5GiB`, `free` the names of what was decided
    by hand and would have to be left to the plan. No `host`: it is the device. No `on_host`: state cannot be put there."""

    on_host: str | None
    host: Callable[[int], str] | None
    sp: Callable[[int], str]
    length: Callable[[int], str]
    budget: Callable[[str], str]
    device: Callable[[int], str] = "{} GiB of device memory".format
    free: Callable[[Sequence[str]], str] = lambda names: "memory='auto'"


LIBRARY = Words(
    "on_host='everything'",
    "parallelize(..., host_budget='{}GiB')".format,
    "sp={}".format,
    "length={:,}".format,
    "parallelize(..., memory_budget='{}')".format,
)


def typed_free(names: Sequence[str]) -> str:
    """Settings of a run that are left to the plan again."""
    return " ".join(f"memory.{name}=null" for name in names)


def explain(terms: Sequence[Term], budget: int, host_budget: int | None = None) -> str:
    """Every term with a bar, device first; the bars' full width is the budget."""
    device = [(term.name, term.device_bytes, term.formula) for term in terms if term.device_bytes]
    host = [(term.name, term.host_bytes, term.formula) for term in terms if term.host_bytes]
    lines = _table("device", device, budget)
    if host:
        lines += _table("host", host, host_budget)
    return "\n".join(lines)


def _table(place: str, rows: list[tuple[str, int, str]], budget: int | None) -> list[str]:
    total = sum(size for _, size, _ in rows)
    scale = max(budget or total, total, 1)
    unit, named = memory_unit(total)
    lines = [f"{name:<24}{size / unit:>8.2f}  {_bar(size / scale)}  {formula}" for name, size, formula in rows]
    of = f" of {show_bytes(budget, 1)}" if budget else ""
    over = "" if not budget or total <= budget else f", {show_bytes(total - budget)} too much"
    return [*lines, f"{f'{place}, {named}':<24}{total / unit:>8.2f}{of}{over}"]


def _bar(share: float) -> str:
    eighths = round(share * BAR * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[part].strip()).ljust(BAR)


def refusal(
    sizes: ModelSizes,
    job: Job,
    smallest: Memory,
    device_budget: int,
    host_budget: int,
    *,
    fits: Fits,
    words: Words = LIBRARY,
    freed: Sequence[str] = (),
) -> MemoryPlanError:
    """The error for a job that no plan fits; `smallest` is the nearest miss. `freed`: decided by hand, but for that it fits."""
    host_is_short = smallest.host_bytes > host_budget
    blame = smallest.largest(host=host_is_short)
    size = blame.host_bytes if host_is_short else blame.device_bytes
    changes = [words.free(freed)] if freed else []
    changes += _changes(sizes, job, device_budget, host_budget, fits, words)
    advice = "any one of these fits: " + "; ".join(changes) if changes else "no single change that was tried fits"
    return MemoryPlanError(
        f"{job.length:,} tokens over sp={job.sp} do not fit: the smallest plan takes "
        f"{show_part(smallest.device_bytes, device_budget)} on the device and "
        f"{show_part(smallest.host_bytes, host_budget)} on the host, worst at the {smallest.moment}. "
        f"The largest term is {blame.name!r}, {show_bytes(size, 1)} ({blame.formula}); {advice}"
    )


def _changes(sizes: ModelSizes, job: Job, device: int, host: int, fits: Fits, words: Words) -> Iterator[str]:
    """Changes of one kind each that make the job fit, the cheapest first."""
    yield from _to_host(job, device, host, fits, words)
    cut = next((cut for cut in _cuts(job, sizes.heads) if fits(cut, device, host)), None)
    if cut is not None:
        yield words.sp(cut.sp)
    steps = largest(job.length // STEP, lambda step: fits(replace(job, length=step * STEP), device, host))
    if steps:
        yield words.length(steps * STEP)
    larger = smallest(device // GIB + 1, MOST_DEVICE // GIB, lambda gib: fits(job, gib * GIB, host))
    if larger:
        yield words.device(larger)


def _to_host(job: Job, device: int, host: int, fits: Fits, words: Words) -> Iterator[str]:
    """More of the host, for saved tensors or for everything."""
    if words.host is None:
        return
    away = replace(job, weights_on_host=True, gradients_on_host=True, optimizer_on_host=True)
    ways = [("", job)]
    if words.on_host is not None:
        ways.append((f"{words.on_host} (weights, gradients and optimizer state)", away))
    for name, changed in ways:
        # What the host has may do; more of it is named with the amount.
        needed = smallest(host // GIB, MOST_HOST // GIB, partial(_fits_host, fits, changed, device))
        if needed is not None:
            amount = words.host(needed)
            yield name if needed <= host // GIB else f"{name}, with {amount}" if name else amount
            return


def _fits_host(fits: Fits, job: Job, device: int, gib: int) -> bool:
    return fits(job, device, gib * GIB)


def _cuts(job: Job, heads: int) -> Iterator[Job]:
    """The job over more ranks a row: the ranks there are, which then have fewer rows at a time, or as many as it takes."""
    sp, ranks = job.sp, job.world // job.ring
    while (sp := 2 * sp) <= heads:
        dp = max(1, ranks // sp)
        if (ranks % sp == 0 or sp > ranks) and sp * dp * job.ring % job.replicas == 0:
            yield replace(job, sp=sp, dp=dp, accumulate=job.accumulate or dp < job.dp)


def smallest(low: int, high: int, works: Callable[[int], bool]) -> int | None:
    """The smallest value from `low` to `high` that works, where more always works better."""
    if low > high or not works(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle + 1, high)
    return low


def largest(high: int, works: Callable[[int], bool]) -> int | None:
    """The largest value from 1 to `high` that works, where less always works better."""
    if high < 1 or not works(1):
        return None
    low = 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low
