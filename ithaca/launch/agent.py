"""Ranks of one machine under torchrun's elastic agent, with our own ending: signals, failures, no orphans.

The agent does the rendezvous, starts the processes and waits for them. Left alone it would end all workers 30 s after
any signal, and print a page for every failure. Here a signal is handed on once and the ranks have `grace` seconds to
save; when one rank fails the others have a few seconds to end by themselves; what is left then is killed, with all
that it started.

Invariant: when `start_ranks` returns or raises, none of its ranks is alive.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError

from ithaca.errors import ConfigError
from ithaca.exit_codes import INTERRUPTED, PEER, PREEMPTED
from ithaca.launch.failures import Verdict, judge
from ithaca.launch.nodes import Nodes, meet, missing
from ithaca.launch.scratch import scratch_folder
from ithaca.launch.terminal import say_beside_a_bar
from ithaca.launch.worker import Entry, Report, work

LINGER = 5.0
# Warnings of torch's C++ come with a stack of frames: a rank whose launcher was killed has one to print of its store.
_HUSHED = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
HANDED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class Agent(LocalElasticAgent):
    """The elastic agent, which also knows who is alive and ends what is left of a failed run soon."""

    killed: frozenset[int] = frozenset()
    starting = False

    def alive(self) -> list[Any]:
        return [process for process in self._processes() if process.is_alive()]

    def codes(self) -> dict[int, int]:
        """Exit codes by global rank; a rank that was never started has none."""
        ranks = [worker.global_rank for worker in self.get_worker_group().workers]
        return {rank: process.exitcode or 0 for rank, process in zip(ranks, self._processes(), strict=False)}

    def send(self, number: signal.Signals) -> None:
        for process in self.alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self) -> None:
        """End every rank at once, and what it started."""
        ranks = [worker.global_rank for worker in self.get_worker_group().workers]
        alive = {rank: p for rank, p in zip(ranks, self._processes(), strict=False) if p.is_alive()}
        self.killed |= frozenset(alive)
        for process in self._processes():
            for end in (os.killpg, os.kill):
                # A rank that has not yet made a group of its own has none to be killed.
                with suppress(ProcessLookupError, PermissionError):
                    if end is os.killpg or process.is_alive():
                        end(process.pid, signal.SIGKILL)
        for process in alive.values():
            process.join(LINGER)

    def _processes(self) -> list[Any]:
        context = getattr(self._pcontext, "_pc", None)
        return [] if context is None else list(context.processes)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.starting = True
        try:
            # Inherited: until it has left the terminal's group, Ctrl-C is not for a rank to hear.
            with _ignoring(signal.SIGINT):
                started = super()._start_workers(worker_group)
        finally:
            self.starting = False
        context: Any = getattr(self._pcontext, "_pc", None)
        context.join = partial(self._join, context.join)
        return started

    def _join(self, join: Callable[..., bool], timeout: float | None = None, *args: Any) -> bool:
        """torch's, which ends every other rank as soon as it sees one fail; here that rank is seen before torch looks."""
        processes = self._processes()
        if len(self.alive()) == len(processes):
            ended = wait([process.sentinel for process in processes], timeout)
            if not ended:
                return False
            for process in processes:
                # Its pipe is closed a moment before it has an exit code.
                if process.sentinel in ended:
                    process.join()
        if any(process.exitcode for process in processes):
            self._end_soon()
        return join(timeout, *args)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._end_soon()
        super()._shutdown(*args, **kwargs)

    def _end_soon(self) -> None:
        deadline = time.monotonic() + LINGER
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()


class Stopped(Exception):
    """A signal came while there was no rank to hand it to."""


@dataclass(slots=True)
class Handover:
    """Signals to the launcher, handed to its ranks: the first asks them to save, Ctrl-C after that ends them.

    `saves`: whether ranks have something to save; if not, the verb that started them says that it was stopped.
    """

    agent: Agent
    grace: float
    saves: bool = True
    asked: int = 0
    deadline: threading.Timer | None = None

    def __call__(self, number: int, _frame: object = None) -> None:
        if self.agent.starting:
            # Half of the ranks may be there: an instant later all are, or none.
            later = threading.Timer(0.1, os.kill, (os.getpid(), number))
            later.daemon = True
            later.start()
            return
        again, self.asked = self.asked, self.asked or number
        if not self.agent.alive():
            raise Stopped
        if not again:
            # One signal for all cases: a rank that is still importing dies of it without a word.
            self.agent.send(signal.SIGTERM)
            self.deadline = threading.Timer(self.grace, self.agent.kill)
            self.deadline.daemon = True
            self.deadline.start()
            if self.saves:
                _say(f"stopping: the steps taken so far are saved within {self.grace:g} s (Ctrl-C again ends at once)")
        elif number == signal.SIGINT:
            self.agent.kill()

    @property
    def status(self) -> int:
        return INTERRUPTED if self.asked == signal.SIGINT else PREEMPTED

    @contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # `nohup` has SIGHUP ignored, and means it.
        heard = [n for n in HANDED_ON if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            if self.deadline is not None:
                self.deadline.cancel()


def start_ranks(
    entry: Entry,
    args: Sequence[Any],
    processes: int,
    nodes: Nodes,
    grace: float,
    variables: Mapping[str, str],
    saves: bool,
) -> int:
    """Run `entry(*args)` on `processes` ranks here, as a part of `nodes`; gives the status for the shell.

    `variables` are for the ranks' environment, where they are not set already.
    """
    with scratch_folder() as folder, _quiet(), _environment(variables):
        handler = meet(nodes)
        spec = WorkerSpec(
            role="rank",
            local_world_size=processes,
            entrypoint=work,
            args=(entry, tuple(args), folder),
            rdzv_handler=handler,
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="127.0.0.1" if nodes.count == 1 else None,
        )
        agent = Agent(spec, DefaultLogsSpecs(log_dir=folder), start_method="spawn")
        handover = Handover(agent, grace, saves)
        try:
            with handover.installed():
                result = _run(agent, nodes)
        except Stopped:
            return handover.status
        finally:
            agent.kill()
            handler.shutdown()
        return _status(agent, handover, result, Report.read_all(folder))


def _status(agent: Agent, handover: Handover, result: RunResult | None, reports: Sequence[Report]) -> int:
    if result is not None and not result.is_failed():
        status = max((status or 0 for status in result.return_values.values()), default=0)
        return handover.status if status == PREEMPTED and handover.asked else status
    codes = agent.codes()
    own = [report for report in reports if not report.consequence]
    if handover.asked and not own:
        # Ended while starting, by the signal itself; or not done when the grace was over; or by a second Ctrl-C.
        if handover.saves and agent.killed and handover.asked != signal.SIGINT:
            _say(f"the ranks had not saved within {handover.grace:g} s and were ended: the last checkpoint stands")
        return handover.status
    verdict = (
        judge(reports, codes, agent.killed) if codes else Verdict("the other machines ended before this one", PEER)
    )
    if verdict.text:
        _say(verdict.text)
    return verdict.status


def _run(agent: Agent, nodes: Nodes) -> RunResult | None:
    """The agent's result, or None where the machines parted before there was one."""
    try:
        return agent.run()
    except RendezvousError:
        if agent.codes():
            return None
        raise ConfigError(missing(nodes)) from None


@contextmanager
def _ignoring(number: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent's own log lines, kept off the terminal."""
    logger = logging.getLogger("torch.distributed.elastic")
    nowhere, before = logging.NullHandler(), logger.propagate
    logger.addHandler(nowhere)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(nowhere)
        logger.propagate = before


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Variables that ranks and the agent read, for the time of a launch; of `defaults` those the user has not set."""
    before = dict(os.environ)
    os.environ.update({**_HUSHED, **defaults, **before})
    # Said by a process of Python's own, after the launcher was killed, of what the system frees by itself.
    warnings = [before.get("PYTHONWARNINGS"), "ignore:resource_tracker"]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, warnings))
    # The agent takes over the signals named here, and none that `Handover` is for.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _say(text: str) -> None:
    say_beside_a_bar(text)
