"""`VerifiedFiles`: files of checkpoints that were read and summed once, known again by their sizes and times.

A checkpoint may hold hundreds of gigabytes, and is looked at whenever another is written: it is read once, and again
only where a file has changed since. One rank keeps the record and decides for all.

Invariant: a file whose size, times or inode differ from those at its last reading is read again.
"""

from __future__ import annotations

import time
from pathlib import Path

from ithaca.state.checkpoint.manifest import Sums

# A file system's clock may stand still for so long: a file that was changed just before it was looked at may change
# again without another time.
_RACY_NS = 20_000_000

Stamp = tuple[int, int, int, int]


class VerifiedFiles:
    """The files of a run's checkpoints that were found whole, with the sums they were held against."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, tuple[Stamp, dict[str, int]]]] = {}

    def add(self, path: Path, files: Sums) -> None:
        """Take note that a checkpoint is whole now, its files as the manifest has them."""
        now = time.time_ns()
        stamps = {name: _stamp(path / name) for name in files}
        self._known[path.name] = {
            name: (stamp, files[name])
            for name, stamp in stamps.items()
            if stamp is not None and now - stamp[2] > _RACY_NS
        }

    def doubtful(self, path: Path, files: Sums) -> list[str]:
        """Return the files of a manifest that must be read to say whether the checkpoint is whole."""
        known = self._known.get(path.name, {})
        return [name for name in sorted(files) if known.get(name) != (_stamp(path / name), files[name])]


def _stamp(file: Path) -> Stamp | None:
    try:
        found = file.stat()
    except OSError:
        return None
    # The time of the inode's last change comes third: it moves where the other one was set by hand.
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
