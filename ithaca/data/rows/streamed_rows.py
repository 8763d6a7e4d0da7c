"""Rows of a stream: documents are read and tokenized on the way, and packed within windows of bounded size.

    stream   doc doc doc doc doc | doc doc doc doc | doc doc ...
    windows  [ 0: rows 0 to 31  ] [ 1: rows 32..  ] [ 2 ...      each packed by itself from WINDOW rows of tokens

A window's rows depend on the seed, the window's number and the documents alone. So every sequence group, at any degree,
reads the whole stream and takes its own rows. The feed's state is the start of a window, plain JSON. The end of the
last source ends a window and begins the next epoch.

The files of a stream may change while a run is stopped. A state therefore holds a checksum of the last window's tokens:
opening a feed reads that window again and refuses another checksum.

Invariant: `row(i)` of a feed opened from `state(i)` is `row(i)` of the feed that never stopped.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from ithaca.data.rows.packing import DocumentSlice, PackedRows, RowKind, pieces_between
from ithaca.data.rows.shuffle import Ints
from ithaca.data.rows.stored_rows import describe_pieces, row_tensors
from ithaca.data.rows.stream_sources import Document, RoundRobin, StreamedSources
from ithaca.data.sources.changes import changed_source
from ithaca.errors import DataError

# Rows of a window: more rows pack tighter and take more memory.
WINDOW = 32
# Window starts that the feed remembers, so that `state` may go back by as many windows.
_REMEMBERED = 64
# Tokens that are summed at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class WindowStart:
    """Start of a window: its first row, its number, tokens to skip (joined rows), and the sources' state there.

    `sum`: checksum of the window's documents; empty before they are read.
    """

    row: int
    window: int
    skip: int
    turns: dict[str, Any]
    sum: str = ""

    def dump(self) -> dict[str, Any]:
        plain = {"row": self.row, "window": self.window, "skip": self.skip, "turns": self.turns, "sum": self.sum}
        return copy.deepcopy(plain)


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of a window, their documents, and the start of the next window."""

    start: WindowStart
    documents: list[Document]
    rows: list[list[DocumentSlice]]
    next: WindowStart


class StreamFeed:
    """Feed of a stream. Rows are read forwards; an earlier row makes the feed read again from where it was opened."""

    def __init__(
        self,
        streamed: StreamedSources,
        *,
        length: int,
        kind: RowKind,
        seed: int,
        pad: int,
        validation: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._length, self._kind, self._seed, self._pad = length, kind, seed, pad
        self._sources = RoundRobin(streamed, validation=validation)
        saved = WindowStart(**copy.deepcopy(dict(state))) if state else None
        self._opened = saved or WindowStart(0, 0, 0, self._sources.state())
        self._sources.restore(self._opened.turns)
        # Start of the window that the sources are at, and the starts of windows that `state` may return.
        self._current = self._opened
        self._starts = [self._opened]
        self._window: Window | None = None
        self._tokens = self._capacity = 0
        self.notes = self._sources.compare(self._opened.turns)
        if self._opened.sum:
            self._check_unchanged(streamed)

    @property
    def left_out(self) -> tuple[str, ...]:
        return self._sources.left_out

    @property
    def rows_per_epoch(self) -> int | None:
        return None

    @property
    def packing_efficiency(self) -> float:
        """Share of tokens that are not padding in the windows read so far."""
        return self._tokens / self._capacity if self._capacity else 1.0

    def row(self, index: int) -> dict[str, Tensor]:
        window = self._reach(index)
        pieces = window.rows[index - window.start.row]
        slices = [window.documents[piece.document].piece(piece.start, piece.count) for piece in pieces]
        return row_tensors(slices, self._length, self._pad)

    def describe(self, index: int) -> str:
        window = self._reach(index)
        pieces = window.rows[index - window.start.row]
        return describe_pieces(index, [(window.documents[piece.document].origin, piece) for piece in pieces])

    def state(self, index: int) -> dict[str, Any]:
        known = [start for start in self._starts if start.row <= index]
        if not known:
            raise DataError(f"row {index} lies too far behind row {self._starts[-1].row} to be gone back to")
        # A window that was read has a checksum, which is compared when the run resumes.
        read = [start for start in known if start.sum]
        return max(read or known, key=lambda start: start.row).dump()

    def _check_unchanged(self, streamed: StreamedSources) -> None:
        """Read the last window again; DataError if its documents have changed."""
        window = self._window = self._read(self._opened)
        if _sum(window.documents) != self._opened.sum:
            names = " and ".join(located.name for located in streamed.located)
            last = window.start.row + len(window.rows) - 1
            raise changed_source(
                names, f"its text around rows {window.start.row} to {last} is another, or ends before them"
            )

    def _reach(self, index: int) -> Window:
        """Return the window that holds a row, after reading up to it."""
        if index < self._opened.row:
            raise DataError(f"row {index} lies before row {self._opened.row}, where this stream was taken up")
        window = self._window
        if window is None or index < window.start.row:
            window = self._read(self._opened)
        while index >= window.start.row + len(window.rows):
            window = self._read(window.next)
        self._window = window
        return window

    def _read(self, start: WindowStart) -> Window:
        """Read the window that begins at `start`, and leave the sources at the start of the next one."""
        if start is not self._current:
            self._sources.restore(start.turns)
        documents, states, ended = self._gather(start)
        ends = np.cumsum([len(document.ids) for document in documents], dtype=np.int64)
        if self._kind == "packed":
            rows = self._pack(ends, start.window)
            used, skip = len(states) - 1, 0
        else:
            rows, used, skip = self._join(ends, start.skip, states, ended)
        self._current = WindowStart(start.row + len(rows), start.window + 1, skip, states[used][1])
        # Documents behind the window's last row are read again by the next window.
        if used != len(states) - 1:
            self._sources.restore(self._current.turns)
        read = replace(start, sum=_sum(documents))
        before = [read if known is start else known for known in self._starts]
        self._starts = [*(known for known in before if known.row < self._current.row), self._current][-_REMEMBERED:]
        self._tokens += sum(piece.count for row in rows for piece in row)
        self._capacity += len(rows) * self._length
        return Window(start, documents, rows, self._current)

    def _gather(self, start: WindowStart) -> tuple[list[Document], list[tuple[int, dict[str, Any]]], bool]:
        """Return a window's documents, the tokens and the state after each batch, and True at an epoch's end."""
        documents: list[Document] = []
        tokens, ended = 0, False
        states = [(0, start.turns)]
        while tokens - start.skip < WINDOW * self._length and not ended:
            found, ended = self._sources.batch()
            documents += found
            tokens += sum(len(document.ids) for document in found)
            states.append((tokens, self._sources.state()))
        return documents, states, ended

    def _pack(self, ends: Ints, window: int) -> list[list[DocumentSlice]]:
        if not len(ends):
            return []
        plan = PackedRows(np.diff(ends, prepend=0), self._length, self._seed)
        return [plan.pieces(window * plan.rows_per_epoch + row) for row in range(plan.rows_per_epoch)]

    def _join(
        self, ends: Ints, skip: int, states: list[tuple[int, dict[str, Any]]], ended: bool
    ) -> tuple[list[list[DocumentSlice]], int, int]:
        """Return whole rows, and the batch and token of the next window's start; an epoch's last row may be short."""
        total = int(ends[-1]) if len(ends) else 0
        # Whole rows only, except at an epoch's end: the tokens behind them begin the next window.
        count = (total - skip) // self._length
        count += ended and (total - skip) % self._length > 0
        begins = range(skip, skip + count * self._length, self._length)
        rows = [pieces_between(ends, begin, min(begin + self._length, total)) for begin in begins]
        if ended:
            return rows, len(states) - 1, 0
        until = skip + count * self._length
        used = max(at for at, (tokens, _) in enumerate(states) if tokens <= until)
        return rows, used, until - states[used][0]


def _sum(documents: Sequence[Document]) -> str:
    """Return a checksum of all documents' ids and loss masks."""
    total = hashlib.blake2b(digest_size=16)
    for document in documents:
        size = len(document.ids)
        total.update(size.to_bytes(8, "little"))
        # In chunks: a copy of a whole document may not fit into memory.
        for start in range(0, size, _CHUNK):
            total.update(document.ids[start : start + _CHUNK].astype(np.int64).tobytes())
        for start in range(0, size, _CHUNK):
            total.update(document.piece(start, min(_CHUNK, size - start))[1].tobytes())
    return total.hexdigest()
