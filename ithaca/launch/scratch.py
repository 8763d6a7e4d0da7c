"""Temporary folders of a command. The folder of a command that was killed is removed when the next command starts.

Each folder holds a file `owner` with the name of its machine, under a lock that ends with the process. Folders of other
users, of other machines and of running commands are left alone.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from ithaca.data.sources.file_locks import take
from ithaca.launch.stopped import cleaned_if_stopped

_PREFIX = "ithaca-"
_OWNER = "owner"


@contextmanager
def scratch_folder() -> Iterator[str]:
    """Make a folder for this process, and remove it afterwards."""
    clear_left(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # The file gets its name only once it is locked: no other command may take the folder for an abandoned one.
    born = folder / f".{_OWNER}"
    handle = take(born, wait=True)
    assert handle is not None
    try:
        os.write(handle, socket.gethostname().encode())
        born.rename(folder / _OWNER)
        with cleaned_if_stopped(partial(shutil.rmtree, folder, ignore_errors=True)):
            yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def clear_left(where: Path) -> None:
    """Remove the folders that processes of this user and machine left when they were killed."""
    for owner in where.glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(OSError):
            if owner.stat().st_uid != os.getuid() or owner.read_text(encoding="utf-8") != socket.gethostname():
                continue
            handle = take(owner, wait=False)
            if handle is not None:
                shutil.rmtree(owner.parent, ignore_errors=True)
                os.close(handle)
