"""A pool of CPU ranks over gloo, kept alive between tests so that a test of four ranks costs milliseconds.

`run_ranks(4, fn, *args)` runs the module-level `fn(*args)` on four processes at once, with torch.distributed
already joined by exactly those four, and gives their results by rank. Worker i is always rank i; a smaller
world uses the first workers.

Invariant: when a call returns or raises, every live worker waits for its next call. A rank that fails leaves
its group at once, which ends its peers' collectives; workers that still do not answer within GRACE seconds
are killed, and the next call forks new ones. After a failure no process group is used again.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.worker import NUMBERS, Call, Idle, Raised, Returned, pack, unpack

ROOT = Path(__file__).resolve().parent.parent
MOST = 8
START = 300.0
GRACE = 3.0
# Seconds that an idle worker has to end by itself.
PATIENCE = 5
# A test's own subgroups live as long as the default group; joining anew now and then bounds sockets and threads.
REUSE = 16
# Files open in a worker above which it is replaced by a new one.
WORN = 300


class RankError(Exception):
    """Some rank raised. `rank` is the first that did; `exceptions` has all that did, by rank."""

    def __init__(self, exceptions: dict[int, Raised]) -> None:
        self.exceptions = dict(sorted(exceptions.items()))
        # By the ranks' clock, not by arrival: the peers of a failed rank raise too, milliseconds later.
        self.rank = min(exceptions, key=lambda rank: exceptions[rank].when)
        first = exceptions[self.rank]
        others = [f"rank {rank} too: {raised}" for rank, raised in self.exceptions.items() if rank != self.rank]
        super().__init__("\n".join([f"rank {self.rank} raised {first}", first.traceback, *others]).rstrip())


@dataclass(frozen=True, slots=True)
class Template:
    """A process that has imported torch and Ithaca, and forks ranks: see `worker.fork_on_request`."""

    process: subprocess.Popen[bytes]
    control: socket.socket

    @classmethod
    def start(cls) -> Template:
        """Start a fresh interpreter, so that nothing of pytest's state (capture, warnings, plugins) leaks into it."""
        ours, theirs = socket.socketpair()
        ours.settimeout(START)
        loopback = "lo" if sys.platform == "linux" else "lo0"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": loopback,
            # macOS ends a forked process that uses its frameworks, unless it is told not to.
            "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.worker import fork_on_request; fork_on_request({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        return cls(process, ours)

    def request(self, first: int, second: int, *descriptors: int) -> None:
        socket.send_fds(self.control, [NUMBERS.pack(first, second)], descriptors)

    def answer(self) -> tuple[int, int]:
        message = self.control.recv(NUMBERS.size, socket.MSG_WAITALL)
        if len(message) < NUMBERS.size:
            raise RuntimeError(f"a template of ranks ended with exit status {self.process.wait()}")
        first, second = NUMBERS.unpack(message)
        return first, second

    def stop(self) -> None:
        self.control.close()
        self.process.wait()


# Two, as their hash seeds differ: an order of a set that ranks have to share, and do not, is seen between neighbours.
COUNT = 2
TEMPLATES: list[Template] = []


def stop_templates() -> None:
    while TEMPLATES:
        TEMPLATES.pop().stop()


@dataclass(frozen=True, slots=True)
class Worker:
    template: Template
    process: int
    connection: Connection

    @classmethod
    def start(cls, ranks: range, port: int) -> list[Worker]:
        """Fork workers of these ranks: of all templates at once, which import for seconds when they are new."""
        templates = [rank % COUNT for rank in ranks]
        while len(TEMPLATES) <= max(templates):
            TEMPLATES.append(Template.start())
        connections = []
        for rank, number in zip(ranks, templates, strict=True):
            ours, theirs = Pipe()
            TEMPLATES[number].request(rank, port, theirs.fileno())
            theirs.close()
            connections.append(ours)
        return [
            cls(TEMPLATES[number], TEMPLATES[number].answer()[0], connection)
            for number, connection in zip(templates, connections, strict=True)
        ]

    def wait(self, patience: int) -> int:
        """Return the exit status; kill the process where it has not ended within so many seconds."""
        self.template.request(self.process, patience)
        process, status = self.template.answer()
        assert process == self.process
        return status


@dataclass(slots=True)
class Answers:
    """What the ranks of one call have said so far."""

    world: int
    returned: dict[int, Any] = field(default_factory=dict)
    raised: dict[int, Raised] = field(default_factory=dict)
    idle: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)

    @property
    def silent(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.idle | self.dead]

    def take(self, rank: int, worker: Worker) -> None:
        try:
            answer = worker.connection.recv()
        except (EOFError, OSError):
            self.dead.add(rank)
            # Its peers may have noticed before us; a death is taken as the cause of what they raised.
            died = Raised("WorkerDied", f"the process ended with exit status {worker.wait(PATIENCE)}", when=0.0)
            self.raised.setdefault(rank, died)
            return
        match answer:
            case Raised():
                self.raised[rank] = answer
            case Idle():
                self.idle.add(rank)
            case Returned(payload):
                self.returned[rank] = unpack(payload)
                self.idle.add(rank)


@dataclass(slots=True)
class Pool:
    """The workers alive now. `joined` is the (world, timeout) of the group of `generation`, None where broken."""

    workers: list[Worker] = field(default_factory=list)
    store: dist.TCPStore | None = None
    generation: int = 0
    joined: tuple[int, float] | None = None
    calls: int = 0

    def run(self, world: int, payload: bytes, timeout: float) -> list[Any]:
        if not 1 <= world <= MOST:
            raise ValueError(f"world={world}: the pool has between 1 and {MOST} ranks")
        if self._worn():
            self.stop()
        try:
            self._grow(world)
            call = Call(self._generation(world, timeout), world, timeout, payload)
            for worker in self.workers[:world]:
                worker.connection.send(call)
            answers = self._collect(world, timeout)
        except BaseException:  # Ctrl-C, or a worker gone before it was sent its call
            self.stop(patience=0)
            raise
        if answers.silent or answers.dead:
            self.stop(patience=0)
        if answers.raised:
            self.joined = None
            raise RankError(answers.raised)
        return [answers.returned[rank] for rank in range(world)]

    def stop(self, patience: int = PATIENCE) -> None:
        """End the workers: an idle one ends with its connection, one that stays is killed."""
        for worker in self.workers:
            worker.connection.close()
        for worker in self.workers:
            worker.wait(patience)
        self.workers.clear()
        self.joined = None
        self.store = None

    def _worn(self) -> bool:
        """Whether groups that tests joined are still open somewhere, compiled code among it, in large numbers: each has
        a thread that looks about a hundred times a second, and hundreds of them leave no core for the tests."""
        files = Path(f"/proc/{self.workers[0].process}/fd") if self.workers else None
        return files is not None and files.is_dir() and len(os.listdir(files)) > WORN

    def _grow(self, world: int) -> None:
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        new = range(len(self.workers), world)
        self.workers += Worker.start(new, self.store.port) if new else []
        for rank in new:
            connection = self.workers[rank].connection
            if not connection.poll(START) or not isinstance(connection.recv(), Idle):
                raise RuntimeError(f"worker {rank} did not start within {START:g} s")

    def _generation(self, world: int, timeout: float) -> int:
        """The group to run in: the last one while the same world asks with the same timeout, else a new one."""
        self.calls += 1
        if self.joined != (world, timeout) or self.calls > REUSE:
            self.generation, self.joined, self.calls = self.generation + 1, (world, timeout), 1
        return self.generation

    def _collect(self, world: int, timeout: float) -> Answers:
        """Wait for all ranks; once one has raised, for GRACE seconds at most."""
        answers = Answers(world)
        # gloo gives up after `timeout`, with a traceback that shows where: let that arrive first.
        deadline = time.monotonic() + timeout + GRACE
        while answers.silent:
            ranks = {self.workers[rank].connection: rank for rank in answers.silent}
            ready = wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                why = f"no answer in the {timeout:g} s it had, or {GRACE:g} s after a failure"
                answers.raised = {rank: Raised("TimeoutError", why) for rank in answers.silent} | answers.raised
                break
            calm = not answers.raised
            for rank in (ranks[connection] for connection in ready if isinstance(connection, Connection)):
                answers.take(rank, self.workers[rank])
            if calm and answers.raised:
                deadline = min(deadline, time.monotonic() + GRACE)
        return answers


POOL = Pool()


def stop_all() -> None:
    POOL.stop()
    stop_templates()


atexit.register(stop_all)


def run_ranks(world: int, fn: Callable[..., Any], /, *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `world` ranks at once; results by rank, or RankError with the first cause."""
    return POOL.run(world, pack((fn, args, kwargs)), timeout)


def expect_refusal(
    world: int,
    fn: Callable[..., Any],
    /,
    *args: Any,
    error: str,
    match: str,
    timeout: float = 120,
    **kwargs: Any,
) -> dict[int, Raised]:
    """Assert that EVERY rank raised an exception named `error` whose message has the regex `match`."""
    try:
        run_ranks(world, fn, *args, timeout=timeout, **kwargs)
    except RankError as caught:
        exceptions = caught.exceptions
        for rank in range(world):
            raised = exceptions.get(rank)
            alike = raised is not None and raised.error == error and re.search(match, raised.message)
            if not alike:
                got = "raised nothing" if raised is None else f"raised {raised}\n{raised.traceback}"
                raise AssertionError(f"rank {rank} of {world}: expected {error} matching {match!r}, {got}") from None
        return exceptions
    raise AssertionError(f"no rank of {world} raised: expected {error} matching {match!r}")
