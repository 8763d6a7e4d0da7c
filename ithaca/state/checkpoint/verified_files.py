"""Cache of verified checksums: files of checkpoints that were summed once are not read again unless they change.

A checkpoint may hold hundreds of gigabytes, and is checked whenever another one is written. One rank keeps the record
and decides for all.

Invariant: a file whose size, times or inode have changed since it was summed is read again.
"""

from __future__ import annotations

import time
from pathlib import Path

from ithaca.state.checkpoint.manifest import Sums

# Resolution of file systems' clocks: a file that changed just before its stat may change again within the same time stamp.
_RACY_NS = 20_000_000

Stamp = tuple[int, int, int, int]


class VerifiedFiles:
    """Verified files of a run's checkpoints, each with its stat and the checksum of the manifest."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, tuple[Stamp, dict[str, int]]]] = {}

    def add(self, path: Path, files: Sums) -> None:
        """Record that the files of a checkpoint have the manifest's checksums now."""
        now = time.time_ns()
        stamps = {name: _stamp(path / name) for name in files}
        self._known[path.name] = {
            name: (stamp, files[name])
            for name, stamp in stamps.items()
            if stamp is not None and now - stamp[2] > _RACY_NS
        }

    def changed_files(self, path: Path, files: Sums) -> list[str]:
        """Return the files of a manifest that must be summed: new ones, and those that have changed since."""
        known = self._known.get(path.name, {})
        return [name for name in sorted(files) if known.get(name) != (_stamp(path / name), files[name])]


def _stamp(file: Path) -> Stamp | None:
    try:
        found = file.stat()
    except OSError:
        return None
    # ctime third: it changes even if a program sets mtime.
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
