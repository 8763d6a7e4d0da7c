"""`Watch`, the watchdog of a rank: progress, stops that all ranks agree on, and hangs reported with the rank behind.

    training thread     pass_boundary("forward layer 3") ─ count 42 ─ pass_boundary("forward layer 4") ─ 43 ─ ... Preempted
    thread `_listen`    signals, heartbeats, stops ──────┐
    thread `_guard`     a store that does not answer     │
                                                         ▼
    store (of rank 0, or of the first machine's agent)   beat/RANK  stop_requested  at/RANK  failed  gone/RANK

Every rank passes the same boundaries in the same order: steps, and each layer's forward and backward. The training
thread only counts them, without a call to the store, so a collective that waits cannot hold the watchdog up.

A stop of all ranks at one boundary, after a signal on any rank:

    1. a rank that got the signal sets `stop_requested` in the store
    2. each rank's watch first sets its own flag `_stop_requested`, then posts its count of boundaries
    3. the target is the largest posted count plus one
    4. a training thread raises `Preempted` when its count reaches the target

A training thread counts a boundary first and reads the flag afterwards. So after its rank has posted count n, the
thread cannot get past boundary n + 1 without knowing the target, and the target is at least n + 1.

Invariant: `Preempted` is raised on all ranks at the same boundary, or on none; every collective before it is matched.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from ithaca.exit_codes import HANG, INTERRUPTED, PEER
from ithaca.mesh import Mesh
from ithaca.training.watch.hangs import Heartbeat, explain, locate
from ithaca.training.watch.layer_boundaries import put_boundaries
from ithaca.training.watch.signals import Signals
from ithaca.training.watch.throttle import Throttle

logger = logging.getLogger("ithaca")

# Seconds between two looks at the store, between two heartbeats, and that a failing rank has to report its error.
POLL, BEAT, LINGER = 0.2, 1.0, 5.0


class Preempted(Exception):
    """The stop of all ranks at one boundary; the step in flight is given up."""


class Watch:
    """The watchdog of this rank: `with Watch.of(mesh) as watch: ...` on every rank.

    `hang`: seconds without a boundary that count as a hang. `end`: called with an exit code to end the process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        hang: float = 600.0,
        device: torch.device | None = None,
        poll: float = POLL,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.store, self.rank, self.world, self.poll, self.end = store, rank, world, poll, end
        self.count = 0
        self.label = "start"
        self.limit = hang
        self._moved = time.monotonic()
        self._trainer: int | None = None
        self._throttle = Throttle() if device and device.type == "cuda" else None
        # The stop: requested on any rank; the target known; this rank's count posted; Preempted raised here.
        self._stop_requested, self._known, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._target = 0
        self._stopped = self._posted = False
        self._lock = threading.Lock()
        self._signals = Signals()
        self._interrupts = 0
        self._stop_requested_here = False
        self._beaten = self._polled = self._began = 0.0
        self._store_lost: float | None = None
        # Since when a hang is being reported, and the posts at that time on the one rank that reports.
        self._reporting: tuple[float, list[Heartbeat] | None] | None = None
        self._threads: list[threading.Thread] = []

    @classmethod
    def of(cls, mesh: Mesh, *, hang: float = 600.0) -> Watch:
        """Return this rank's watchdog, over a connection of its own to the store in which the ranks met."""
        default: Any = HashStore() if mesh.world == 1 else dist.distributed_c10d._get_default_store()
        store: Store = default.clone()
        number = store.add(f"watch/{mesh.rank}", 1)
        return cls(PrefixStore(f"watch/{number}", store), mesh.rank, mesh.world, hang=hang, device=mesh.device)

    def __enter__(self) -> Watch:
        self._trainer = threading.get_ident()
        self._moved = self._polled = time.monotonic()
        self._began = time.time()
        self._signals.open()
        self._beat()
        for body in (self._listen, self._guard):
            self._threads.append(threading.Thread(target=body, daemon=True, name="ithaca watch"))
            self._threads[-1].start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close(failed=error is not None and not isinstance(error, Preempted))

    # On the training thread.

    @property
    def stop_requested(self) -> bool:
        """True if a stop was requested on any rank; the ranks stop at one of the next boundaries."""
        return self._stop_requested.is_set()

    @property
    def stop_requested_here(self) -> bool:
        """True if a stop was requested on this rank, even if the other ranks do not know yet."""
        return self._stop_requested_here or self.stop_requested

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C reached this rank."""
        return self._interrupts > 0

    def request_stop(self) -> None:
        """Ask all ranks to stop, as a signal does."""
        self._stop_requested_here = True

    def pass_boundary(self, label: str) -> None:
        """Pass a boundary, in the same order on all ranks; raise `Preempted` at the boundary where all ranks stop."""
        self._trainer = threading.get_ident()
        reached = label if self._throttle is None else self._throttle.advance(label, self.label)
        self.count += 1
        self.label, self._moved = reached, time.monotonic()
        if self._stop_requested.is_set() and not self._stopped:
            self._known.wait()
            self._moved = time.monotonic()
            if self.count >= self._target:
                self._stopped = True
                raise Preempted(f"stopped at '{label}'")

    def install(self, layers: Sequence[nn.Module]) -> Callable[[], None]:
        """Put a boundary before every layer's forward and backward; return the function that removes them."""
        if not layers and self.rank == 0:
            logger.warning("this model names no layers: a stop or a hang is seen between steps only")
        return put_boundaries(layers, self.pass_boundary)

    @contextmanager
    def expect_long(self, seconds: float, label: str) -> Iterator[None]:
        """Allow `seconds` without a boundary inside, for work that is no step."""
        before = self.label, self.limit
        self.label, self.limit, self._moved = label, max(self.limit, seconds), time.monotonic()
        try:
            yield
        finally:
            self._moved = time.monotonic()
            self.label, self.limit = before

    def close(self, *, failed: bool = False) -> None:
        """Leave together with the other ranks; or report that this rank failed, which ends the others within seconds."""
        if not self._threads:
            return
        try:
            if failed:
                self.store.set("failed", str(self.rank))
                self.store.set("alarm", "1")
            else:
                self._leave()
        except RuntimeError:
            pass  # The process that holds the store has ended.
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=LINGER)
        self._threads.clear()
        self._signals.close()

    def _leave(self) -> None:
        """Wait until all ranks leave; rank 0, which may hold the store, leaves last."""
        self._post()  # A stop still being agreed on waits for this rank's count, which grows no more.
        self.store.set(f"gone/{self.rank}", "1")
        everyone = [f"gone/{rank}" for rank in range(self.world)]
        _wait_until(lambda: self._closing.is_set() or self.store.check(everyone), self.limit)
        self.store.add("left", 1)
        if self.rank == 0:
            _wait_until(lambda: self.store.add("left", 0) == self.world, LINGER)

    # On the watchdog's own threads.

    def _listen(self) -> None:
        while not self._closing.is_set():
            for number in self._signals.receive(self.poll):
                self._interrupts += number == signal.SIGINT
                self._stop_requested_here = True
            if self._interrupts > 1:
                self.end(INTERRUPTED)
            try:
                self._poll_store()
            except RuntimeError:
                # The process that holds the store has ended. The training thread may report the cause within LINGER.
                self._store_lost = self._store_lost or time.monotonic()
            if self._store_lost and time.monotonic() - self._store_lost > LINGER and not self._closing.is_set():
                self.end(PEER)

    def _poll_store(self) -> None:
        if self._stop_requested_here and not self._stop_requested.is_set():
            self.store.set("stop_requested", str(self.rank))
            self.store.set("alarm", "1")
        if self.store.check(["alarm"]):
            if self.store.check(["failed"]):
                self._store_lost = self._store_lost or time.monotonic()
            if self.store.check(["stop_requested"]) and not self._known.is_set():
                self._agree()
        if time.monotonic() - self._beaten > BEAT:
            self._beat()
        self._polled = time.monotonic()
        if self._idle() > self.limit:
            self._report_hang()
        else:
            self._cancel_report()

    def _agree(self) -> None:
        self._stop_requested.set()  # Before the count is read: step 2 of the picture.
        self._post()
        posts = [f"at/{rank}" for rank in range(self.world)]
        if self.store.check(posts):
            self._target = max(int(count) for count in self.store.multi_get(posts)) + 1
            self._known.set()

    def _post(self) -> None:
        with self._lock:
            if not self._posted:
                self.store.set(f"at/{self.rank}", str(self.count))
                self._posted = True

    def _idle(self) -> float:
        return time.monotonic() - self._moved

    def _beat(self) -> None:
        idle = self._idle()
        where, waits = locate(self._trainer) if idle > BEAT else ("", False)
        post = Heartbeat(self.rank, self.count, self.label, idle, time.time(), where, waits)
        self.store.set(f"beat/{self.rank}", post.write())
        self._beaten = time.monotonic()

    def _last_heartbeats(self) -> list[Heartbeat]:
        """Return the last heartbeat of each rank; a rank without any is taken to stand at the start."""
        there = [rank for rank in range(self.world) if self.store.check([f"beat/{rank}"])]
        beats = dict(zip(there, self.store.multi_get([f"beat/{rank}" for rank in there]), strict=True))
        return [
            Heartbeat.read(beats[rank]) if rank in beats else Heartbeat(rank, 0, "start", 0.0, self._began)
            for rank in range(self.world)
        ]

    def _report_hang(self) -> None:
        """Report the hang on one rank, and end all ranks; called at each poll for as long as nothing moves."""
        if self._reporting is None:
            # The store's counter elects the one rank that reports.
            first = self.store.add("accuser", 1) == 1
            self._reporting = time.monotonic(), self._last_heartbeats() if first else None
            return
        since, before = self._reporting
        waited = time.monotonic() - since
        # Every rank whose watchdog is alive has posted again by then.
        if before is not None and waited > 3 * BEAT:
            posts = self._last_heartbeats()
            silent = {post.rank for post, earlier in zip(posts, before, strict=True) if post == earlier}
            _write_line(explain(posts, silent, time.time()))
            self.store.set("said", "1")
            self.end(HANG)
        if before is None and (waited > 2 * LINGER or self.store.check(["said"])):
            self.end(HANG)

    def _cancel_report(self) -> None:
        """Give the report up, because boundaries are passed again."""
        if self._reporting is not None and self._reporting[1] is not None:
            self.store.set("accuser", "0")
        self._reporting = None

    def _guard(self) -> None:
        """End this rank if the process that holds the store is suspended: every call to the store then waits."""
        while not self._closing.wait(BEAT):
            still = time.monotonic() - self._polled
            if self._idle() > self.limit and still > 4 * LINGER:
                if self.rank == min(1, self.world - 1):
                    _write_line(
                        f"rank 0 or its launcher stopped answering {still:.0f} s ago: the others wait in '{self.label}'"
                    )
                self.end(HANG)


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(POLL / 4)


def _write_line(text: str) -> None:
    # To the descriptor: a thread that hangs may hold the lock of the stream.
    os.write(2, f"ithaca: {text}\n".encode())
