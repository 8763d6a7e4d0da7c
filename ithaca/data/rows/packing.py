"""Which pieces of which documents make up row i: a pure function of (lengths, length, seed, epoch).

"packed": documents longer than a row are cut into pieces, pieces are put into rows best fit, longest first. "joined":
the epoch's documents one after the other, cut at the length. Either way pieces keep apart (each is a document of its
own to the model) and padding stands at the end of a row only.

Invariant: every token of every document is in exactly one row of an epoch; any row is found without the ones before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from ithaca.data.rows.shuffle import Ints, shuffle
from ithaca.errors import DataError

RowKind = Literal["packed", "joined"]
_WORD = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` tokens of document `document` from token `start` on."""

    document: int
    start: int
    count: int


class RowPlan(Protocol):
    """Rows of one epoch after the other."""

    @property
    def rows_per_epoch(self) -> int: ...

    @property
    def fill(self) -> float: ...

    def pieces(self, row: int) -> list[Piece]: ...


def plan_rows(lengths: Ints, length: int, kind: RowKind, seed: int) -> RowPlan:
    """The plan for documents of these lengths; empty ones take no room."""
    if not int(lengths.sum()):
        raise DataError("there are no tokens to make rows of: all documents are empty")
    return PackedRows(lengths, length, seed) if kind == "packed" else JoinedRows(lengths, length, seed)


@dataclass(slots=True)
class JoinedRows:
    """The epoch's documents in a new order each time, as one stream cut at the length."""

    lengths: Ints
    length: int
    seed: int
    _epoch: tuple[int, Ints, Ints] | None = None

    @property
    def rows_per_epoch(self) -> int:
        return -(-int(self.lengths.sum()) // self.length)

    @property
    def fill(self) -> float:
        return int(self.lengths.sum()) / (self.rows_per_epoch * self.length)

    def pieces(self, row: int) -> list[Piece]:
        epoch, place = divmod(row, self.rows_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            order = shuffle(len(self.lengths), self.seed, epoch)
            self._epoch = epoch, order, np.cumsum(self.lengths[order])
        _, order, ends = self._epoch
        begin, end = place * self.length, min((place + 1) * self.length, int(ends[-1]))
        return [
            Piece(int(order[piece.document]), piece.start, piece.count) for piece in pieces_between(ends, begin, end)
        ]


def pieces_between(ends: Ints, begin: int, end: int) -> list[Piece]:
    """The documents' parts in tokens [begin, end) of a stream in which document i ends at `ends[i]`."""
    found = []
    at = int(np.searchsorted(ends, begin, side="right"))
    while begin < end:
        first = int(ends[at - 1]) if at else 0
        count = min(int(ends[at]), end) - begin
        if count:
            found.append(Piece(at, begin - first, count))
        begin, at = begin + count, at + 1
    return found


@dataclass
class PackedRows:
    """Best fit. The rows' shapes are those of every epoch; which of equally long pieces goes where, and the order of
    rows, is the epoch's."""

    lengths: Ints
    length: int
    seed: int
    _epoch: tuple[int, Ints, Ints, Ints] | None = field(default=None, repr=False)

    @cached_property
    def _pieces(self) -> tuple[Ints, Ints, Ints]:
        """Document, start and count of every piece, in the documents' order."""
        counts = -(-self.lengths // self.length)
        documents = np.repeat(np.arange(len(self.lengths)), counts)
        firsts = np.cumsum(counts) - counts
        starts = (np.arange(len(documents)) - firsts[documents]) * self.length
        return documents, starts, np.minimum(self.lengths[documents] - starts, self.length)

    @cached_property
    def _packing(self) -> tuple[Ints, Ints]:
        """For pieces sorted by falling length: the row of each, and (for CSR) the ends of rows in row order."""
        sizes = np.sort(self._pieces[2])[::-1]
        rows = best_fit(sizes, self.length)
        return rows, np.cumsum(np.bincount(rows))

    @property
    def rows_per_epoch(self) -> int:
        return len(self._packing[1])

    @property
    def fill(self) -> float:
        return int(self.lengths.sum()) / (self.rows_per_epoch * self.length)

    def pieces(self, row: int) -> list[Piece]:
        epoch, place = divmod(row, self.rows_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = self._arrange(epoch)
        _, order, by_row, rows = self._epoch
        chosen = int(rows[place])
        ends = self._packing[1]
        inside = by_row[(int(ends[chosen - 1]) if chosen else 0) : int(ends[chosen])]
        documents, starts, counts = self._pieces
        return [Piece(int(documents[i]), int(starts[i]), int(counts[i])) for i in order[inside]]

    def _arrange(self, epoch: int) -> tuple[int, Ints, Ints, Ints]:
        counts = self._pieces[2]
        mixed = shuffle(len(counts), self.seed, epoch, 0)
        order = mixed[np.argsort(-counts[mixed], kind="stable")]
        by_row = np.argsort(self._packing[0], kind="stable")
        return epoch, order, by_row, shuffle(self.rows_per_epoch, self.seed, epoch, 1)


def best_fit(sizes: Ints, length: int) -> Ints:
    """The row of each piece, for sizes that fall: each goes where it leaves the least room, else into a new row.

    Equal sizes are placed together, so a million documents take as many steps as there are different sizes and rooms.
    """
    rows = np.empty(len(sizes), np.int64)
    values, counts = np.unique(sizes, return_counts=True)
    room = _Room(length)
    at = opened = 0
    for size, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            free = room.least(size)
            each = (length if free is None else free) // size
            wanted = -(-left // each)
            if free is None:
                chosen = list(range(opened, opened + wanted))
                opened, free = opened + wanted, length
            else:
                chosen = room.take(free, wanted)
            placed = min(left, len(chosen) * each)
            rows[at : at + placed] = np.repeat(chosen, each)[:placed] if placed > 1 else chosen[0]
            short = len(chosen) * each - placed
            room.put(free - each * size, chosen if not short else chosen[:-1])
            if short:
                room.put(free - (each - short) * size, chosen[-1:])
            at, left = at + placed, left - placed
    return rows


class _Room:
    """Rows by the room they have left, and the least room that fits a size, in a few operations on two bitmaps."""

    def __init__(self, length: int) -> None:
        self._rows: dict[int, list[int]] = {}
        self._words = [0] * (length // _WORD + 1)
        self._summary = 0

    def least(self, size: int) -> int | None:
        word, bit = divmod(size, _WORD)
        here = self._words[word] >> bit
        if here:
            return size + (here & -here).bit_length() - 1
        above = self._summary >> (word + 1)
        if not above:
            return None
        word += (above & -above).bit_length()
        found = self._words[word]
        return word * _WORD + (found & -found).bit_length() - 1

    def take(self, free: int, wanted: int) -> list[int]:
        """Up to `wanted` rows with `free` tokens left; they are no longer there."""
        there = self._rows[free]
        chosen = there[-wanted:]
        del there[-wanted:]
        if not there:
            word, bit = divmod(free, _WORD)
            self._words[word] &= ~(1 << bit)
            if not self._words[word]:
                self._summary &= ~(1 << word)
        return chosen

    def put(self, free: int, rows: list[int]) -> None:
        if not free or not rows:
            return
        self._rows.setdefault(free, []).extend(rows)
        word, bit = divmod(free, _WORD)
        self._words[word] |= 1 << bit
        self._summary |= 1 << word
