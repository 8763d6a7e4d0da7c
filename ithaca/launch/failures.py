"""The first cause of a failed run, out of the reports and exit codes of this machine's ranks.

In this order: the earliest error that a rank raised itself; a rank that ended without a report, by a signal for
instance; a hang, which the watch has printed already; an error raised because another rank was gone. Functions of
values only.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from ithaca.exit_codes import HANG, PEER
from ithaca.launch.worker import Report


@dataclass(frozen=True, slots=True)
class FirstCause:
    """The text to print about a failed run, which may be empty, and the status to exit with."""

    text: str
    status: int


def find_cause(reports: Sequence[Report], codes: Mapping[int, int], killed: Set[int]) -> FirstCause:
    """Return the first cause. `codes`: exit codes by rank. `killed`: the ranks that the agent killed."""
    own = sorted((report for report in reports if not report.consequence), key=lambda report: report.when)
    if own:
        return _describe_report(own[0], reports, codes)
    reported = {report.rank for report in reports}
    silent = {
        rank: code for rank, code in sorted(codes.items()) if code and rank not in reported and rank not in killed
    }
    for rank, code in silent.items():
        if code not in (HANG, PEER):
            return _describe_exit(rank, code, codes)
    if HANG in silent.values():
        return FirstCause("", HANG)
    if reports and PEER not in silent.values():
        return _describe_report(min(reports, key=lambda report: report.when), reports, codes)
    return FirstCause(f"{_ranks(codes)} ended because a rank on another machine did, which says why", PEER)


def _describe_report(first: Report, reports: Sequence[Report], codes: Mapping[int, int]) -> FirstCause:
    same = [report.rank for report in reports if (report.error, report.message) == (first.error, first.message)]
    if first.user:
        # A mistake that all ranks refuse names none of them.
        who = "" if len(same) == len(codes) else f"{_ranks(same)}: "
        return FirstCause(f"{who}{first.message}", first.status)
    also = [rank for rank in codes if rank not in same]
    then = f"; {_ranks(also)} ended because of it" if also else ""
    return FirstCause(f"{_ranks(same)} failed: {first.error}: {first.message}{then}\n\n{first.traceback}", first.status)


def _describe_exit(rank: int, code: int, codes: Mapping[int, int]) -> FirstCause:
    others = [other for other in codes if other != rank]
    then = f"; {_ranks(others)} ended because of it" if others else ""
    if code > 0:
        return FirstCause(f"rank {rank} ended with status {code}, what it printed is above{then}", code)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    why = {
        "SIGKILL": " (the kernel does that when the machine's memory is full: look at `dmesg`)",
        "SIGSEGV": " (a fault in compiled code: run again with PYTHONFAULTHANDLER=1 to see where)",
        "SIGBUS": " (shared memory or a disk is full: look at `df -h /dev/shm`)",
    }.get(name, "")
    return FirstCause(f"rank {rank} was ended by {name}{why}{then}", 128 - code)


def _ranks(ranks: Sequence[int] | Mapping[int, int]) -> str:
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"ranks {numbers[0]}-{numbers[-1]}" if whole else "ranks " + ", ".join(map(str, numbers))
