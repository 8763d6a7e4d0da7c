"""`Signals`: signals that a thread reads at once, even while the main thread waits inside a collective.

Python runs signal handlers on the main thread, between two instructions, so a rank inside an all-to-all would handle
SIGTERM only after its peers have joined. Python's C handler writes the signal's number to the wake-up descriptor
(`signal.set_wakeup_fd`) without that delay, and any thread can read the descriptor.

Invariant: handlers and descriptor from before `open` are back after `close`.
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
    """The signals in `numbers`, from `open` to `close`; no signals outside the main thread, where Python allows none."""

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
        self._before = {number: signal.signal(number, _ignore) for number in self.numbers}

    def receive(self, seconds: float) -> list[int]:
        """Return the signals that came; wait at most `seconds` for the first."""
        if self._ends is None:
            time.sleep(seconds)
            return []
        # A timeout instead of select(), which takes no descriptor above 1023.
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
            # None: a handler that was not set from Python, to which the default is nearest.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._descriptor)
        for end in self._ends:
            end.close()
        self._ends = None


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing; without a handler in Python the default action would end the process."""
