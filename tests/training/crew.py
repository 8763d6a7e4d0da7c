"""Ranks as threads of one process, for tests of the watch: a store in memory, barriers for collectives.

Hundreds of schedules take seconds this way; the same watches over gloo and real signals are in test_watch_ranks.py.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore

from ithaca.training.watch.watch import Preempted, Watch

PATIENCE = 20.0  # of one collective, after which its rank gives up
FOR_EVER = 120.0


@dataclass
class Crew:
    """`world` watchdogs, each with a thread that trains; `ended`: the exit codes, by rank."""

    world: int
    hang: float = 60.0
    kind: type[Watch] = Watch
    ended: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        store = HashStore()
        self.together = threading.Barrier(self.world)
        self.watches = [
            self.kind(PrefixStore("crew", store), rank, self.world, hang=self.hang, poll=0.005, end=self._ending(rank))
            for rank in range(self.world)
        ]

    def _ending(self, rank: int) -> Callable[[int], None]:
        def end(status: int) -> None:
            self.ended.setdefault(rank, status)
            self.together.abort()
            self.watches[rank]._closing.set()  # ends the watch's threads, as os._exit ends all of them

        return end

    def collective(self) -> None:
        self.together.wait(PATIENCE)

    def until_ended(self) -> None:
        """Hang: do nothing until another rank's watchdog has ended this rank."""
        deadline = time.monotonic() + PATIENCE
        while not self.ended and time.monotonic() < deadline:
            time.sleep(0.01)

    def sail(self, body: Callable[[Watch], Any]) -> dict[int, Any]:
        """Run `body(watch)` on every rank; return its results, ("preempted", count), or the errors' names."""
        threads = [threading.Thread(target=self._one, args=(watch, body), daemon=True) for watch in self.watches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(FOR_EVER)
            assert not thread.is_alive(), "a rank waits for ever"
        return self.outcomes

    def _one(self, watch: Watch, body: Callable[[Watch], Any]) -> None:
        try:
            with watch:
                try:
                    self.outcomes[watch.rank] = body(watch)
                except Preempted:
                    self.outcomes[watch.rank] = "preempted", watch.count
        except Exception as error:
            self.outcomes[watch.rank] = type(error).__name__


def voyage(crew: Crew, seed: int, boundaries: int, askers: int) -> dict[int, Any]:
    """Boundaries at random paces, a collective after every third, and a stop asked for at a random time."""

    def body(watch: Watch) -> str:
        chance = random.Random(seed * 100 + watch.rank)
        asks = chance.randrange(boundaries) if watch.rank < askers else -1
        for number in range(boundaries):
            if number == asks:
                watch.request_stop()
            watch.pass_boundary(f"layer {number}")
            time.sleep(chance.choice([0.0, 0.0, 0.001, 0.004]))
            if number % 3 == 2:
                crew.collective()
        return "done"

    return crew.sail(body)
