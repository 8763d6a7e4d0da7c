"""Whether the files of a source are those that a stream was read from: their names and sizes, summed in their order.

A stream is not kept, so what a stopped run has read of it can be gone or changed when it goes on. Names and sizes cost
no reading; of the text itself the feed compares the last window (`stream.py`).

Invariant: sums are of what was there when the source was opened; of a hub name nothing is known, and nothing said.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ithaca.errors import DataError


@dataclass(frozen=True, slots=True)
class Listing:
    """`sums[n]` is that of the first n files."""

    sums: tuple[int, ...]

    @classmethod
    def of(cls, files: Iterable[str]) -> Listing:
        sums = [0]
        for file in files:
            # A folder may be moved as a whole: the file's own name is enough, their order says the rest.
            sums.append(zlib.crc32(f"{os.path.basename(file)}\0{_size(file)}".encode(errors="replace"), sums[-1]))
        return cls(tuple(sums))

    def dump(self, read: int) -> list[int]:
        """For a stream that has read `read` files to their end: their number and sum, and those of all; plain JSON."""
        return [read, self.sums[read], len(self.sums) - 1, self.sums[-1]]

    def compare(self, saved: Sequence[int], name: str) -> str:
        """What to tell of files that changed behind what was read, or nothing; DataError where those before did."""
        read, read_sum, count, whole_sum = saved
        if read >= len(self.sums):
            raise other_text(name, f"it has {len(self.sums) - 1:,} files, of which {read:,} were read to their end")
        if self.sums[read] != read_sum:
            raise other_text(name, f"the first {read:,} of its files, read to their end, have other names or sizes")
        if [count, whole_sum] == self.dump(0)[2:]:
            return ""
        now = len(self.sums) - 1
        how = "files of other sizes" if now == count else f"{now:,} files instead of {count:,}"
        return f"{name} has {how}: the run goes on from where it was, with other rows than it would have had"


def other_text(name: str, why: str) -> DataError:
    """The refusal of a stream that is not the one that was read."""
    return DataError(
        f"{name} is not what the run has read so far, {why}: put it back as it was, or start anew from the run's export "
        "with model.name=... and output=..."
    )


def _size(file: str) -> int:
    try:
        return os.path.getsize(file)
    except OSError:
        return -1
