"""File locks (`flock`) whose file is removed with the lock.

The operating system ends the lock with its process; the next command removes the file of a killed process. A process
may get its lock on a file that was removed meanwhile, so a lock counts only if its file still has the name.

Invariant: of all processes that use `locked` on a name, one at a time is inside.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ithaca.atomic import part_of

_NAME = re.compile(r"\.?([0-9a-f]{24})\.(?:lock|part)")


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Wait for the lock, hold it inside, and remove its file."""
    handle = take(file, wait=True)
    assert handle is not None
    try:
        yield
    finally:
        # Removed while locked: after the unlock, another process may already be inside with this very file.
        file.unlink(missing_ok=True)
        os.close(handle)


def take(file: Path, *, wait: bool) -> int | None:
    """Return an open descriptor that holds the lock; None where another process has it and `wait` is False."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # The holder before us may have removed the file while we waited: then another process locks a new one.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(file)):
                    return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def clear_leftovers(folder: Path) -> None:
    """Remove the locks and half-written stores of processes that have ended; those of living processes stay."""
    names = {found[1] for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))}
    for name in names:
        # Another user's lock cannot be opened: that user's next command clears it.
        with suppress(PermissionError):
            lock = folder / f"{name}.lock"
            handle = take(lock, wait=False)
            if handle is not None:
                shutil.rmtree(part_of(folder / name), ignore_errors=True)
                lock.unlink(missing_ok=True)
                os.close(handle)
