"""Rows of data that does not fit a disk: read as it comes, tokenized on the way, packed over a bounded window.

A window is `WINDOW` rows' worth of tokens. Its rows depend on seed, window and documents alone, so every sequence
group, at any degree, reads the whole stream and takes its own rows. Where a window begins, plain JSON, is the feed's
state: from it the same rows come again. The end of the last source ends a window and begins the next epoch.

Nothing of a stream is kept, so a source may have changed when a run goes on. A state is that of the last window that
was read, with a sum of its text: opening a feed from it reads that window again, and another sum is refused.

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

from ithaca.data.rows.packing import PackedRows, Piece, RowKind, pieces_between
from ithaca.data.rows.shuffle import Ints
from ithaca.data.rows.stored_rows import describe_pieces, row_tensors
from ithaca.data.rows.stream_sources import Document, Streamed, Turns
from ithaca.data.sources.changes import other_text
from ithaca.errors import DataError

WINDOW = 32
_REMEMBERED = 64
_PART = 1 << 20


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a window begins: its first row, its number, the sources' state, and tokens to leave out (joined rows).

    `sum`: of the documents that were read in it; empty where none were yet.
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
    """Some rows, their documents, and where the next window begins."""

    begin: Begin
    documents: list[Document]
    rows: list[list[Piece]]
    next: Begin


class StreamFeed:
    """A feed over a stream. Rows are read forwards; going back reads again from where the feed was opened."""

    def __init__(
        self,
        streamed: Streamed,
        *,
        length: int,
        kind: RowKind,
        seed: int,
        pad: int,
        validation: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._length, self._kind, self._seed, self._pad = length, kind, seed, pad
        self._turns = Turns(streamed, validation=validation)
        self._opened = Begin(**copy.deepcopy(dict(state))) if state else Begin(0, 0, 0, self._turns.state())
        self._turns.restore(self._opened.turns)
        self._standing = self._opened
        self._begins = [self._opened]
        self._window: Window | None = None
        self._tokens = self._room = 0
        self.notes = self._turns.compare(self._opened.turns)
        if self._opened.sum:
            self._check_text(streamed)

    @property
    def left_out(self) -> tuple[str, ...]:
        return self._turns.left_out

    @property
    def rows_per_epoch(self) -> int | None:
        return None

    @property
    def fill(self) -> float:
        """Of the windows read so far."""
        return self._tokens / self._room if self._room else 1.0

    def row(self, index: int) -> dict[str, Tensor]:
        window = self._reach(index)
        pieces = window.rows[index - window.begin.row]
        slices = [window.documents[piece.document].piece(piece.start, piece.count) for piece in pieces]
        return row_tensors(slices, self._length, self._pad)

    def describe(self, index: int) -> str:
        window = self._reach(index)
        pieces = window.rows[index - window.begin.row]
        return describe_pieces(index, [(window.documents[piece.document].origin, piece) for piece in pieces])

    def state(self, index: int) -> dict[str, Any]:
        known = [begin for begin in self._begins if begin.row <= index]
        if not known:
            raise DataError(f"row {index} lies too far behind row {self._begins[-1].row} to be gone back to")
        # A window that was read can be compared when the run goes on; one that was not cannot.
        read = [begin for begin in known if begin.sum]
        return max(read or known, key=lambda begin: begin.row).dump()

    def _check_text(self, streamed: Streamed) -> None:
        """DataError where the window that was read last is another now."""
        window = self._window = self._read(self._opened)
        if _sum(window.documents) != self._opened.sum:
            names = " and ".join(located.name for located in streamed.located)
            last = window.begin.row + len(window.rows) - 1
            raise other_text(
                names, f"its text around rows {window.begin.row} to {last} is another, or ends before them"
            )

    def _reach(self, index: int) -> Window:
        """The window that holds a row, read up to it if need be."""
        if index < self._opened.row:
            raise DataError(f"row {index} lies before row {self._opened.row}, where this stream was taken up")
        window = self._window
        if window is None or index < window.begin.row:
            window = self._read(self._opened)
        while index >= window.begin.row + len(window.rows):
            window = self._read(window.next)
        self._window = window
        return window

    def _read(self, begin: Begin) -> Window:
        if begin is not self._standing:
            self._turns.restore(begin.turns)
        documents, places, ended = self._gather(begin)
        ends = np.cumsum([len(document.ids) for document in documents], dtype=np.int64)
        if self._kind == "packed":
            rows = self._packed(ends, begin.window)
            used, skip = len(places) - 1, 0
        else:
            rows, used, skip = self._joined(ends, begin.skip, places, ended)
        self._standing = Begin(begin.row + len(rows), begin.window + 1, skip, places[used][1])
        if used != len(places) - 1:
            self._turns.restore(self._standing.turns)
        read = replace(begin, sum=_sum(documents))
        before = [read if known is begin else known for known in self._begins]
        self._begins = [*(known for known in before if known.row < self._standing.row), self._standing][-_REMEMBERED:]
        self._tokens += sum(piece.count for row in rows for piece in row)
        self._room += len(rows) * self._length
        return Window(begin, documents, rows, self._standing)

    def _gather(self, begin: Begin) -> tuple[list[Document], list[tuple[int, dict[str, Any]]], bool]:
        """A window's documents; after each batch the tokens so far and the state; whether the epoch ends here."""
        documents: list[Document] = []
        tokens, ended = 0, False
        places = [(0, begin.turns)]
        while tokens - begin.skip < WINDOW * self._length and not ended:
            found, ended = self._turns.batch()
            documents += found
            tokens += sum(len(document.ids) for document in found)
            places.append((tokens, self._turns.state()))
        return documents, places, ended

    def _packed(self, ends: Ints, window: int) -> list[list[Piece]]:
        if not len(ends):
            return []
        plan = PackedRows(np.diff(ends, prepend=0), self._length, self._seed)
        return [plan.pieces(window * plan.rows_per_epoch + row) for row in range(plan.rows_per_epoch)]

    def _joined(
        self, ends: Ints, skip: int, places: list[tuple[int, dict[str, Any]]], ended: bool
    ) -> tuple[list[list[Piece]], int, int]:
        """Whole rows, and the batch and token where the next window begins; at an epoch's end a row may be short."""
        total = int(ends[-1]) if len(ends) else 0
        count = (total - skip) // self._length
        count += ended and (total - skip) % self._length > 0
        begins = range(skip, skip + count * self._length, self._length)
        rows = [pieces_between(ends, begin, min(begin + self._length, total)) for begin in begins]
        if ended:
            return rows, len(places) - 1, 0
        until = skip + count * self._length
        used = max(place for place, (tokens, _) in enumerate(places) if tokens <= until)
        return rows, used, until - places[used][0]


def _sum(documents: Sequence[Document]) -> str:
    """Of all documents' ids and what is learned of them."""
    total = hashlib.blake2b(digest_size=16)
    for document in documents:
        size = len(document.ids)
        total.update(size.to_bytes(8, "little"))
        # In parts: a document may be as long as the memory that is left.
        for start in range(0, size, _PART):
            total.update(document.ids[start : start + _PART].astype(np.int64).tobytes())
        for start in range(0, size, _PART):
            total.update(document.piece(start, min(_PART, size - start))[1].tobytes())
    return total.hexdigest()
