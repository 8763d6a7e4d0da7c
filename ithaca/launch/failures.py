"""Which rank failed first, in a few lines, from what all ranks of this machine left behind.

A report of a rank's own error comes first, the earliest of them; then a rank that a signal ended; then a hang, which
the watch has already told; last what ranks raised because another was gone. Functions of values only.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from ithaca.exit_codes import HANG, PEER
from ithaca.launch.worker import Report


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to print and the status to end with."""

    text: str
    status: int


def judge(reports: Sequence[Report], codes: Mapping[int, int], killed: Set[int]) -> Verdict:
    """The first cause. `codes`: exit codes by rank; `killed`: ranks that the launcher itself ended."""
    own = sorted((report for report in reports if not report.consequence), key=lambda report: report.when)
    if own:
        return _told(own[0], reports, codes)
    told = {report.rank for report in reports}
    silent = {rank: code for rank, code in sorted(codes.items()) if code and rank not in told and rank not in killed}
    for rank, code in silent.items():
        if code not in (HANG, PEER):
            return _ended(rank, code, codes)
    if HANG in silent.values():
        return Verdict("", HANG)
    if reports and PEER not in silent.values():
        return _told(min(reports, key=lambda report: report.when), reports, codes)
    return Verdict(f"{_ranks(codes)} ended because a rank on another machine did, which says why", PEER)


def _told(first: Report, reports: Sequence[Report], codes: Mapping[int, int]) -> Verdict:
    alike = [report.rank for report in reports if (report.error, report.message) == (first.error, first.message)]
    if first.user:
        # All ranks refuse alike what is wrong for all of them; a rank of its own is named.
        who = "" if len(alike) == len(codes) else f"{_ranks(alike)}: "
        return Verdict(f"{who}{first.message}", first.status)
    also = [rank for rank in codes if rank not in alike]
    then = f"; {_ranks(also)} ended because of it" if also else ""
    return Verdict(f"{_ranks(alike)} failed: {first.error}: {first.message}{then}\n\n{first.traceback}", first.status)


def _ended(rank: int, code: int, codes: Mapping[int, int]) -> Verdict:
    others = [other for other in codes if other != rank]
    then = f"; {_ranks(others)} ended because of it" if others else ""
    if code > 0:
        return Verdict(f"rank {rank} ended with status {code}, what it printed is above{then}", code)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    why = {
        "SIGKILL": " (the kernel does that when the machine's memory is full: look at `dmesg`)",
        "SIGSEGV": " (a fault in compiled code: run again with PYTHONFAULTHANDLER=1 to see where)",
        "SIGBUS": " (shared memory or a disk is full: look at `df -h /dev/shm`)",
    }.get(name, "")
    return Verdict(f"rank {rank} was ended by {name}{why}{then}", 128 - code)


def _ranks(ranks: Sequence[int] | Mapping[int, int]) -> str:
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"ranks {numbers[0]}-{numbers[-1]}" if whole else "ranks " + ", ".join(map(str, numbers))
