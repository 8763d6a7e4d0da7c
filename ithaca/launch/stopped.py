"""Ctrl-C and SIGTERM while a command has no ranks: one line on what remains on disk, and the exit status of shells.

    during an import                the clean-ups of `cleaned_if_stopped` run, and the process ends at once: an import
                                    may swallow a KeyboardInterrupt, or leave a module that is half there
    in the verb, the first Ctrl-C   KeyboardInterrupt: files are closed and folders removed on the way out
    after 10 s, or Ctrl-C again     the clean-ups run, and the process ends at once
    after the verb                  the process ends at once, without a line

This file imports nothing that takes time: the command line imports it first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from ithaca.exit_codes import INTERRUPTED, PREEMPTED

# Seconds that the verb has to end after a KeyboardInterrupt.
PATIENCE = 10.0

_STAYS = {
    "export": "the checkpoint is as it was, and the same command writes the model anew",
    "prepare": "the sources that it had read whole stay in the cache, and the same command reads the others",
    "train": "no step was under way, and the same command goes on from the run's last checkpoint, or begins where it has none",
}
_NOTHING = "it leaves nothing behind: type it again to start anew"
_VERBS = (*_STAYS, "models", "plan", "rehearse", "verify", "doctor")


class _State:
    """Progress of the command (before its verb, in it, done), and the clean-up to run if the process ends at once."""

    def __init__(self) -> None:
        self.verb = ""
        self.inside = self.done = self.asked = False
        self.cleaners: list[Callable[[], object]] = []


_state = _State()


@contextmanager
def command_signals(*, last: bool) -> Iterator[None]:
    """Handle signals for the time of a command. `last`: True if the process ends with the command; they stay handled."""
    home = os.getpid()
    _state.verb = next((word for word in sys.argv[1:2] if word in _VERBS), "")
    _state.inside = _state.done = _state.asked = False

    def receive(number: int, frame: FrameType | None) -> None:
        if os.getpid() != home:
            # A forked process, which its parent ends.
            os._exit(128 + number)
        _receive(number, frame)

    # A signal that is ignored already, as in a shell's background, stays ignored.
    handled = [number for number in _signals() if signal.getsignal(number) != signal.SIG_IGN]
    with handling(dict.fromkeys(handled, receive), restore=not last):
        try:
            yield
        finally:
            _state.done = True
            with suppress(OSError, ValueError):
                sys.stdout.flush()


@contextmanager
def handling(handlers: Mapping[signal.Signals, Any], *, restore: bool = True) -> Iterator[None]:
    """Install signal handlers for a time; none outside of the main thread, where Python allows none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items() if restore else ():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _signals() -> tuple[signal.Signals, ...]:
    """Return the signals to handle: for `train` also SIGUSR1, which schedulers send before they end a job."""
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGUSR1,) if _state.verb == "train" else ()))


def _receive(number: int, frame: FrameType | None) -> None:
    if _state.done:
        os._exit(status_of(number))
    if number == signal.SIGINT and _state.inside and not _state.asked and not _imports(frame):
        _state.asked = True
        # A timer of the kernel, no thread: the handler runs between any two instructions, with any lock held.
        signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        raise KeyboardInterrupt
    _end(number, frame)


def _end(number: int, _frame: object) -> None:
    """Run the clean-ups, write one line and end the process, without unwinding the stack."""
    for other in _signals():
        signal.signal(other, signal.SIG_IGN)
    for clean in reversed(_state.cleaners):
        with suppress(Exception):
            clean()
    with suppress(OSError):
        # Straight to the descriptor: the stream may be in the middle of a write.
        os.write(2, _line(_state.verb).encode())
    os._exit(status_of(number))


def status_of(number: int) -> int:
    """Return the exit status for a signal: for `train` under SIGTERM or SIGUSR1 the one that schedulers requeue."""
    if number in (signal.SIGINT, signal.SIGALRM):
        return INTERRUPTED
    return PREEMPTED if _state.verb == "train" else 128 + number


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def cleaned_if_stopped(clean: Callable[[], object]) -> Iterator[None]:
    """Call `clean` if the process ends at once inside; an exception is left to the caller's own `finally`."""
    _state.cleaners.append(clean)
    try:
        yield
    finally:
        _state.cleaners.remove(clean)


@contextmanager
def exit_when_stopped(verb: str) -> Iterator[None]:
    """Turn a KeyboardInterrupt inside into one line and the status of an interrupted command."""
    _state.inside = True
    try:
        yield
    except KeyboardInterrupt:
        import typer

        say_stopped(verb)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        _state.inside = False
        if _state.asked:
            signal.setitimer(signal.ITIMER_REAL, 0)


def say_stopped(verb: str) -> None:
    """Write the line to sys.stderr, which is free once the stack is unwound."""
    sys.stderr.write(_line(verb))
    sys.stderr.flush()


def _line(verb: str) -> str:
    """Return the line of what was stopped and what remains; of several ranks only rank 0 has one."""
    if os.environ.get("RANK", "0") != "0":
        return ""
    # A progress bar that is cut off leaves a half-full line, and the terminal without a cursor.
    clear = "\r\x1b[K\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
    who = f"{verb} was stopped before its end" if verb else "stopped before anything was done"
    return f"{clear}ithaca: {who}: {_STAYS.get(verb, _NOTHING)}\n"
