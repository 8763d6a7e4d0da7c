"""`Watch`, one a rank: how far the training is, whether to stop, and who is to blame when nothing moves.

The thread that trains says at every boundary (`at`) how far it is; every rank passes the same boundaries in the same
order. A thread of the watch's own tells that to a store, hears signals, and reads what the others say; no thread that
waits in a collective can hold it up.

Stopping. A signal on any rank is told to the store. Each rank's watch first sets `asked`, then posts the number of
boundaries passed. A thread that reaches a boundary counts it first and then looks at `asked`: so it never passes the
boundary after the posted one without knowing the target, the largest post plus one, which all ranks have yet to reach.

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
from ithaca.training.watch.hangs import Post, explain, locate
from ithaca.training.watch.layer_boundaries import put_boundaries
from ithaca.training.watch.signals import Signals
from ithaca.training.watch.throttle import Pace

logger = logging.getLogger("ithaca")


POLL = 0.2
BEAT = 1.0
LINGER = 5.0


class Preempted(Exception):
    """All ranks stop here, at the same boundary: the step in flight is given up."""


class Watch:
    """Made by `Watch.of(mesh)` on every rank alike, and used as a context: `with Watch.of(mesh) as watch: ...`."""

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
        self._pace = Pace() if device and device.type == "cuda" else None
        self._asked, self._known, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._target = 0
        self._stopped = self._posted = False
        self._lock = threading.Lock()
        self._signals = Signals()
        self._interrupts = 0
        self._wants = False
        self._beaten = self._round_at = self._began = 0.0
        self._lost: float | None = None
        self._accusing: tuple[float, list[Post] | None] | None = None
        self._threads: list[threading.Thread] = []

    @classmethod
    def of(cls, mesh: Mesh, *, hang: float = 600.0) -> Watch:
        """The watch of this rank, over a connection of its own to the store that the ranks met in."""
        default: Any = HashStore() if mesh.world == 1 else dist.distributed_c10d._get_default_store()
        store: Store = default.clone()
        number = store.add(f"watch/{mesh.rank}", 1)
        return cls(PrefixStore(f"watch/{number}", store), mesh.rank, mesh.world, hang=hang, device=mesh.device)

    def __enter__(self) -> Watch:
        self._trainer = threading.get_ident()
        self._moved = self._round_at = time.monotonic()
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

    # What the training thread does.

    @property
    def asked(self) -> bool:
        """Whether a stop has been asked for; it comes at one of the next boundaries."""
        return self._asked.is_set()

    @property
    def wanted(self) -> bool:
        """True if this rank has been asked to stop, whether the others have heard of it or not."""
        return self._wants or self.asked

    @property
    def interrupted(self) -> bool:
        """Whether it was Ctrl-C that asked, here."""
        return self._interrupts > 0

    def ask(self) -> None:
        """Ask all ranks to stop, as a signal does."""
        self._wants = True

    def at(self, label: str) -> None:
        """A boundary: all ranks call this in the same order. Raises `Preempted` where all have agreed to stop."""
        self._trainer = threading.get_ident()
        reached = label if self._pace is None else self._pace.keep(label, self.label)
        self.count += 1
        self.label, self._moved = reached, time.monotonic()
        if self._asked.is_set() and not self._stopped:
            self._known.wait()
            self._moved = time.monotonic()
            if self.count >= self._target:
                self._stopped = True
                raise Preempted(f"stopped at '{label}'")

    def install(self, layers: Sequence[nn.Module]) -> Callable[[], None]:
        """A boundary before every layer's forward and before every layer's backward; gives what takes them off."""
        if not layers and self.rank == 0:
            logger.warning("this model names no layers: a stop or a hang is seen between steps only")
        return put_boundaries(layers, self.at)

    @contextmanager
    def patient(self, seconds: float, label: str) -> Iterator[None]:
        """Inside, `seconds` may go by without a boundary before it counts as a hang."""
        before = self.label, self.limit
        self.label, self.limit, self._moved = label, max(self.limit, seconds), time.monotonic()
        try:
            yield
        finally:
            self._moved = time.monotonic()
            self.label, self.limit = before

    def close(self, *, failed: bool = False) -> None:
        """Leave together with the others, or tell them that this rank failed, which ends them within seconds."""
        if not self._threads:
            return
        try:
            if failed:
                self.store.set("failed", str(self.rank))
                self.store.set("alarm", "1")
            else:
                self._leave()
        except RuntimeError:
            pass  # The store went with the process that held it: nobody is left to tell.
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=LINGER)
        self._threads.clear()
        self._signals.close()

    def _leave(self) -> None:
        """Wait for all ranks to have come here; the first, which may hold the store, goes last."""
        self._post()  # An agreement still under way must not wait for a rank that passes no more boundaries.
        self.store.set(f"gone/{self.rank}", "1")
        everyone = [f"gone/{rank}" for rank in range(self.world)]
        _until(lambda: self._closing.is_set() or self.store.check(everyone), self.limit)
        self.store.add("left", 1)
        if self.rank == 0:
            _until(lambda: self.store.add("left", 0) == self.world, LINGER)

    # What the watch's own threads do.

    def _listen(self) -> None:
        while not self._closing.is_set():
            for number in self._signals.receive(self.poll):
                self._interrupts += number == signal.SIGINT
                self._wants = True
            if self._interrupts > 1:
                self.end(INTERRUPTED)
            try:
                self._round()
            except RuntimeError:
                # The process that holds the store has ended. The training thread may yet say why.
                self._lost = self._lost or time.monotonic()
            if self._lost and time.monotonic() - self._lost > LINGER and not self._closing.is_set():
                self.end(PEER)

    def _round(self) -> None:
        if self._wants and not self._asked.is_set():
            self.store.set("asked", str(self.rank))
            self.store.set("alarm", "1")
        if self.store.check(["alarm"]):
            if self.store.check(["failed"]):
                self._lost = self._lost or time.monotonic()
            if self.store.check(["asked"]) and not self._known.is_set():
                self._agree()
        if time.monotonic() - self._beaten > BEAT:
            self._beat()
        self._round_at = time.monotonic()
        if self._idle() > self.limit:
            self._accuse()
        else:
            self._forgive()

    def _agree(self) -> None:
        self._asked.set()  # Before the count is read: see the module's first lines.
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
        post = Post(self.rank, self.count, self.label, idle, time.time(), where, waits)
        self.store.set(f"beat/{self.rank}", post.write())
        self._beaten = time.monotonic()

    def _posts(self) -> list[Post]:
        """What each rank last said; a rank that never came has stood at the start since."""
        there = [rank for rank in range(self.world) if self.store.check([f"beat/{rank}"])]
        said = dict(zip(there, self.store.multi_get([f"beat/{rank}" for rank in there]), strict=True))
        absent = {rank: Post(rank, 0, "start", 0.0, self._began) for rank in range(self.world) if rank not in said}
        return [absent.get(rank) or Post.read(said[rank]) for rank in range(self.world)]

    def _accuse(self) -> None:
        """Called round after round while nothing moves: one rank says who is behind, and then all end."""
        if self._accusing is None:
            first = self.store.add("accuser", 1) == 1
            self._accusing = time.monotonic(), self._posts() if first else None
            return
        since, before = self._accusing
        waited = time.monotonic() - since
        # Time enough for everyone whose watch is alive to post again.
        if before is not None and waited > 3 * BEAT:
            posts = self._posts()
            silent = {post.rank for post, earlier in zip(posts, before, strict=True) if post == earlier}
            _say(explain(posts, silent, time.time()))
            self.store.set("said", "1")
            self.end(HANG)
        if before is None and (waited > 2 * LINGER or self.store.check(["said"])):
            self.end(HANG)

    def _forgive(self) -> None:
        """It was no hang: things move again."""
        if self._accusing is not None and self._accusing[1] is not None:
            self.store.set("accuser", "0")
        self._accusing = None

    def _guard(self) -> None:
        """Where the process that holds the store is stopped, every call to the store waits: this needs none."""
        while not self._closing.wait(BEAT):
            still = time.monotonic() - self._round_at
            if self._idle() > self.limit and still > 4 * LINGER:
                if self.rank == min(1, self.world - 1):
                    _say(
                        f"rank 0 or its launcher stopped answering {still:.0f} s ago: the others wait in '{self.label}'"
                    )
                self.end(HANG)


def _until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(POLL / 4)


def _say(text: str) -> None:
    """Straight to the descriptor: a thread that is stuck may hold the lock of the stream."""
    os.write(2, f"ithaca: {text}\n".encode())
