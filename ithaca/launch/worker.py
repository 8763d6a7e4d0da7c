"""One rank that the agent started: it runs the entry, and leaves a status or a report in the agent's folder.

A report is a JSON file of the error that ended the rank. The agent reads the reports of all ranks and prints the first
cause once, so a failed rank prints nothing itself.

Invariant: a rank does not outlive the agent's process, and Ctrl-C reaches a rank only through the agent.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ithaca.errors import ConfigError, IthacaError, PeerError
from ithaca.exit_codes import FAILED, PREEMPTED

Entry = str | Callable[..., int | None]

# Parts of the messages that collectives and stores raise when another rank is gone.
_CONSEQUENCES = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport", "Socket closed",
    "remote process exited or there was a network error", "Failed to recv, got 0 bytes", "Stop_waiting response",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """The error that ended one rank. `user`: True for a user's mistake, which needs no traceback.

    `consequence`: True if the error was raised because another rank had ended. `status`: exit code of the rank, and of
    the launcher too if the error was the first cause.
    """

    rank: int
    when: float
    error: str
    message: str
    traceback: str
    user: bool
    consequence: bool
    status: int

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Report:
        text = "".join(traceback.format_exception(error))
        user = isinstance(error, IthacaError)
        status = error.status if isinstance(error, IthacaError) else FAILED
        consequence = isinstance(error, PeerError) or any(part in str(error) for part in _CONSEQUENCES)
        return cls(rank, time.time(), type(error).__name__, str(error), text, user, consequence, status)

    def write(self, folder: str) -> None:
        Path(folder, f"rank-{self.rank}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read_all(cls, folder: str) -> list[Report]:
        return [
            cls(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(Path(folder).glob("rank-*.json"))
        ]


def run_worker(entry: Entry, args: Sequence[Any], folder: str) -> None:
    """Run the entry as one rank, and leave its status in `folder`, or a report if the entry fails."""
    rank = int(os.environ["RANK"])
    _follow_parent()
    try:
        status = run_entry(entry, args)
        Path(folder, f"status-{rank}").write_text(str(status), encoding="utf-8")
    except BaseException as error:
        report = Report.of(rank, error)
        report.write(folder)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through the interpreter's exit: it waits for threads, and for collectives that no peer will join.
        os._exit(report.status)


def read_statuses(folder: str) -> list[int]:
    """Return the statuses of the ranks whose entry returned one."""
    return [int(path.read_text(encoding="utf-8")) for path in Path(folder).glob("status-*")]


def run_entry(entry: Entry, args: Sequence[Any]) -> int:
    """Run `entry` and return its status; a run that a signal stopped returns the one that schedulers requeue."""
    from ithaca.training.watch.watch import Preempted

    try:
        return resolve(entry)(*args) or 0
    except Preempted:
        return PREEMPTED


def resolve(entry: Entry) -> Callable[..., int | None]:
    """Return the function that `package.module:function` names, or the function given."""
    if callable(entry):
        return entry
    module, _, name = entry.partition(":")
    function = getattr(import_module(module), name, None)
    if not callable(function):
        raise ConfigError(f"{entry!r} names no function: write package.module:function")
    return function


def _follow_parent() -> None:
    """Leave the terminal's process group, to which Ctrl-C is sent, and end when the agent's process ends."""
    if hasattr(os, "setsid"):
        os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is a child of the agent's process"
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True, name="ithaca parent").start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    if hasattr(os, "killpg"):
        # The whole group, so that processes which this rank started to read data end too.
        os.killpg(0, signal.SIGKILL)
    os._exit(FAILED)
