"""Folders for the time of one command; those of a command that was killed go when the next one starts.

Each holds a file `owner` with the name of its machine, under a lock that ends with the process. What is another user's,
another machine's, or locked is left alone.
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
    """A folder of this process's own, gone afterwards."""
    clear_left(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # Under its name only once it is locked: nobody may take it for one that was left.
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
    """Remove the folders of processes of this user and machine that are gone."""
    for owner in where.glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(OSError):
            if owner.stat().st_uid != os.getuid() or owner.read_text(encoding="utf-8") != socket.gethostname():
                continue
            handle = take(owner, wait=False)
            if handle is not None:
                shutil.rmtree(owner.parent, ignore_errors=True)
                os.close(handle)
