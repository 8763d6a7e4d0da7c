"""Checksums of a streamed source's file names and sizes, to detect changes while a run is stopped.

Names and sizes cost no reading; `rows/streamed_rows.py` compares the tokens of the last window besides.

Invariant: sums are of the files at the time the source was opened; a hub name has no files and is never refused here.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ithaca.errors import DataError


@dataclass(frozen=True, slots=True)
class FileListing:
    """Checksums of a source's files: `sums[n]` is that of the first n."""

    sums: tuple[int, ...]

    @classmethod
    def of(cls, files: Iterable[str]) -> FileListing:
        sums = [0]
        for file in files:
            # The name without its folder: the whole folder may be moved.
            sums.append(zlib.crc32(f"{os.path.basename(file)}\0{_size(file)}".encode(errors="replace"), sums[-1]))
        return cls(tuple(sums))

    def dump(self, read: int) -> list[int]:
        """Return [read, sum of the first `read` files, number of files, sum of all files]; plain JSON."""
        return [read, self.sums[read], len(self.sums) - 1, self.sums[-1]]

    def compare(self, saved: Sequence[int], name: str) -> str:
        """Return a line about changed files that were not read yet, or ""; refuse changed files that were."""
        read, read_sum, count, whole_sum = saved
        if read >= len(self.sums):
            raise changed_source(name, f"it has {len(self.sums) - 1:,} files, of which {read:,} were read to their end")
        if self.sums[read] != read_sum:
            raise changed_source(name, f"the first {read:,} of its files, read to their end, have other names or sizes")
        if [count, whole_sum] == self.dump(0)[2:]:
            return ""
        now = len(self.sums) - 1
        how = "files of other sizes" if now == count else f"{now:,} files instead of {count:,}"
        return f"{name} has {how}: the run goes on from where it was, with other rows than it would have had"


def changed_source(name: str, why: str) -> DataError:
    """Return the error for a stream whose files have changed since they were read."""
    return DataError(
        f"{name} is not what the run has read so far, {why}: put it back as it was, or start anew from the run's export "
        "with model.name=... and output=..."
    )


def _size(file: str) -> int:
    try:
        return os.path.getsize(file)
    except OSError:
        return -1
