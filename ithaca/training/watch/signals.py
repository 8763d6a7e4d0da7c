"""Signals that a thread can read at once, though the main thread be inside a collective.

Python runs signal handlers on the main thread, between two instructions: a rank that waits inside an exchange would
hear of SIGTERM only when its peers let it go. The interpreter's wake-up descriptor has no such delay: the C handler
writes the signal's number to it, and any thread may read it there.

Invariant: what was installed before is back after `close`.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Signals:
    """The signals in `numbers`, from `open` to `close`; outside the main thread, where Python allows none, no signals."""

    def __init__(self, numbers: Sequence[signal.Signals] = STOP) -> None:
        self.numbers = numbers
        self._before: dict[signal.Signals, Any] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._descriptor = -1

    def open(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._ends = reader, writer
        self._descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _hear) for number in self.numbers}

    def receive(self, seconds: float) -> list[int]:
        """The signals that came, waiting at most so long for the first."""
        if self._ends is None:
            time.sleep(seconds)
            return []
        # Not select(), which takes no descriptor above 1023: a process that holds many files has such.
        self._ends[0].settimeout(seconds)
        try:
            numbers = self._ends[0].recv(256)
        except TimeoutError:
            return []
        return [number for number in numbers if number in self.numbers]

    def close(self) -> None:
        if self._ends is None:
            return
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python; the default is the nearest to it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._descriptor)
        for end in self._ends:
            end.close()
        self._ends = None


def _hear(_number: int, _frame: object) -> None:
    """Nothing to do: the number is on the descriptor. Without a handler the default action would end the process."""
