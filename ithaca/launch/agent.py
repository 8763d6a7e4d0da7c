"""The agent of one machine: it starts this machine's ranks, watches them, and ends those that are left.

    meet other machines ── start ranks ── watch ─────────────────────────── kill what is left ── first cause, status
                                          │ signal       ── SIGTERM ── grace ──┤
                                          │ rank failed  ── LINGER ────────────┤
                                          │ all ended    ──────────────────────┘

- A signal becomes one SIGTERM for every rank; the ranks then have `grace` seconds to save.
- A second Ctrl-C ends the ranks at once.
- When one rank fails, the others have `LINGER` seconds to end by themselves.
- A rank that outlives its time is killed, with every process that the rank started.

Why not torch's `LocalElasticAgent`: none of the four lines above can be had from its public members. Up to torch 2.13
it sends SIGTERM to all ranks as soon as one fails, before the others have reported, and SIGKILL a fixed 30 s later, to
the ranks alone; the grace after a signal can be set only since torch 2.12.
https://github.com/pytorch/pytorch/issues/119856, https://github.com/pytorch/pytorch/pull/192815 (open)

Invariant: when `start_ranks` returns or raises, none of its ranks is alive.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from ithaca.exit_codes import INTERRUPTED, PREEMPTED
from ithaca.launch.failures import find_cause
from ithaca.launch.nodes import Nodes, Rendezvous, meet
from ithaca.launch.scratch import scratch_folder
from ithaca.launch.stopped import handling
from ithaca.launch.terminal import say_beside_a_bar
from ithaca.launch.worker import Entry, Report, read_statuses, run_worker

# Seconds that the other ranks have after one rank failed.
LINGER = 5.0
_PERIOD = 0.1


class Stopped(Exception):
    """A signal that came while this machine had no ranks to pass it to."""


@dataclass(slots=True)
class Agent:
    """The ranks of this machine by global rank, and the signals that came for them.

    `saves`: True if the ranks have something to save. `stop_signal`: the first signal, or 0. `hurried`: True after a second
    Ctrl-C. `idle`: True while there are no ranks yet, or none any more, so that a signal ends the agent's own waiting.
    """

    grace: float
    saves: bool = True
    ranks: dict[int, BaseProcess] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    stop_signal: int = 0
    hurried: bool = False
    idle: bool = False

    @property
    def stopped_status(self) -> int:
        return INTERRUPTED if self.stop_signal == signal.SIGINT else PREEMPTED

    @property
    def codes(self) -> dict[int, int]:
        return {rank: process.exitcode or 0 for rank, process in self.ranks.items()}

    @property
    def failed(self) -> bool:
        return any(self.codes.values())

    def receive(self, number: int, _frame: object = None) -> None:
        """Record a signal, which `watch` passes on: a handler runs between any two instructions and does no more."""
        self.hurried = self.hurried or (self.stop_signal != 0 and number == signal.SIGINT)
        self.stop_signal = self.stop_signal or number
        if self.idle:
            raise Stopped

    def start(self, entry: Entry, args: Sequence[Any], rendezvous: Rendezvous, folder: str) -> None:
        # A rank inherits what is ignored, and ignores Ctrl-C until it has left the terminal's process group.
        with handling({signal.SIGINT: signal.SIG_IGN}):
            for local in range(rendezvous.counts[rendezvous.node]):
                os.environ.update(rendezvous.variables(local))
                process = get_context("spawn").Process(target=run_worker, args=(entry, tuple(args), folder))
                process.start()
                self.ranks[rendezvous.first + local] = process

    def watch(self, machines_parted: Callable[[], bool]) -> None:
        """Return when every rank has ended: by itself, after a signal or a failure, or killed at the deadline."""
        passed_on, deadline = False, math.inf
        while alive := [process for process in self.ranks.values() if process.is_alive()]:
            wait([process.sentinel for process in alive], _PERIOD)
            now = time.monotonic()
            if self.stop_signal and not passed_on:
                passed_on, deadline = True, min(deadline, now + self.grace)
                for process in alive:
                    # SIGTERM whatever came: a rank that is still importing dies of it without a word.
                    process.terminate()
                if self.saves:
                    say_beside_a_bar("stopping (Ctrl-C again ends at once)")
            if self.failed or machines_parted():
                deadline = min(deadline, now + LINGER)
            if self.hurried or now >= deadline:
                self.kill()

    def kill(self) -> None:
        """End every rank at once, and every process that a rank started."""
        alive = {rank: process for rank, process in self.ranks.items() if process.is_alive()}
        self.killed |= set(alive)
        for process in self.ranks.values():
            assert process.pid is not None, "a rank has been started"
            with suppress(ProcessLookupError, PermissionError):
                # The rank's process group, which can outlive the rank.
                os.killpg(process.pid, signal.SIGKILL)
        for process in alive.values():
            # A rank that has just begun has no group of its own.
            process.kill()
            process.join(LINGER)


def start_ranks(
    entry: Entry,
    args: Sequence[Any],
    processes: int,
    nodes: Nodes,
    grace: float,
    variables: Mapping[str, str],
    saves: bool,
) -> int:
    """Run `entry(*args)` on `processes` ranks here, as one of `nodes`, and return the status to exit with.

    `variables`: environment of the ranks, where the user has not set the same variables.
    """
    agent = Agent(grace, saves)
    # `nohup` ignores SIGHUP, and the ranks are to live on after it.
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    handled = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, *hangup]
    with scratch_folder() as folder, _environment(variables), handling(dict.fromkeys(handled, agent.receive)):
        try:
            agent.idle = True
            rendezvous = meet(nodes, processes)
            agent.idle = False
            agent.start(entry, args, rendezvous, folder)
            agent.watch(rendezvous.store_is_gone)
            if not agent.failed:
                agent.idle = True
                rendezvous.wait_for_all()
        except Stopped:
            return agent.stopped_status
        finally:
            agent.idle = False
            agent.kill()
        return _conclude(agent, folder)


def _conclude(agent: Agent, folder: str) -> int:
    """Print the first cause of a failure, if there was one, and return the status to exit with."""
    if not agent.failed:
        status = max(read_statuses(folder), default=0)
        return agent.stopped_status if status == PREEMPTED and agent.stop_signal else status
    reports = Report.read_all(folder)
    if agent.stop_signal and all(report.consequence for report in reports):
        # The signal ended ranks that were starting, or the grace was over, or Ctrl-C came again.
        if agent.saves and agent.killed and agent.stop_signal != signal.SIGINT:
            say_beside_a_bar(
                f"the ranks had not saved within {agent.grace:g} s and were ended: the last checkpoint stands"
            )
        return agent.stopped_status
    cause = find_cause(reports, agent.codes, agent.killed)
    if cause.text:
        say_beside_a_bar(cause.text)
    return cause.status


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the ranks inherit, and take them back; of `defaults` only those that the user has not set."""
    before = dict(os.environ)
    # Where the launcher was killed, torch's C++ would print a stack for each rank that has lost its store.
    os.environ.update({"TORCH_CPP_LOG_LEVEL": "ERROR", **defaults, **before})
    # Python's resource tracker would warn of semaphores that ranks left when they were killed; it frees them itself.
    warnings = [before.get("PYTHONWARNINGS"), "ignore:resource_tracker"]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, warnings))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
