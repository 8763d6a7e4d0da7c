"""Rows of documents, found by number: a pure function of (document lengths, row length, seed, epoch).

    documents   aaaaaaaaaa  bbb  cccc  d           row length 6

    "packed"    aaaaaa | aaaa.. | ccccd. | bbb...  pieces of at most one row, longest first, best fit; . is padding
    "joined"    bbbccc | caaaaa | aaaaad           the epoch's order of documents as one stream, cut at the row length

Each piece is a document of its own to the model: no attention from one piece to the next.

Invariant: every token of every document is in exactly one row of an epoch; any row is found without the rows before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from ithaca.data.rows.shuffle import Ints, shuffle
from ithaca.errors import DataError

RowKind = Literal["packed", "joined"]
# Bits of one word of the bitmaps: two levels reach 1,024 x 1,024 tokens with short integers.
_WORD = 1024


@dataclass(frozen=True, slots=True)
class DocumentSlice:
    """Tokens `start` to `start + count` of document `document`."""

    document: int
    start: int
    count: int


@dataclass(slots=True)
class JoinedRows:
    """Documents in the epoch's order, as one stream that is cut at the row length."""

    lengths: Ints
    length: int
    seed: int
    _epoch: tuple[int, Ints, Ints] | None = None

    @property
    def rows_per_epoch(self) -> int:
        return -(-int(self.lengths.sum()) // self.length)

    @property
    def packing_efficiency(self) -> float:
        return int(self.lengths.sum()) / (self.rows_per_epoch * self.length)

    def pieces(self, row: int) -> list[DocumentSlice]:
        # The order of one epoch is kept: rows are mostly read one after the other.
        epoch, index = divmod(row, self.rows_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            order = shuffle(len(self.lengths), self.seed, epoch)
            self._epoch = epoch, order, np.cumsum(self.lengths[order])
        _, order, ends = self._epoch
        begin, end = index * self.length, min((index + 1) * self.length, int(ends[-1]))
        return [
            DocumentSlice(int(order[piece.document]), piece.start, piece.count)
            for piece in pieces_between(ends, begin, end)
        ]


def pieces_between(ends: Ints, begin: int, end: int) -> list[DocumentSlice]:
    """Return the documents' parts in tokens [begin, end) of a stream in which document i ends at `ends[i]`."""
    found = []
    # "right": past documents that end at `begin`, and past empty ones.
    at = int(np.searchsorted(ends, begin, side="right"))
    while begin < end:
        first = int(ends[at - 1]) if at else 0
        count = min(int(ends[at]), end) - begin
        if count:
            found.append(DocumentSlice(at, begin - first, count))
        begin, at = begin + count, at + 1
    return found


@dataclass
class PackedRows:
    """Best-fit rows, of equal shapes in every epoch; the order of rows and of equally long pieces is the epoch's."""

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
        """Row of each piece, pieces sorted by falling length, and the ends of the rows in row order (as in CSR)."""
        sizes = np.sort(self._pieces[2])[::-1]
        rows = best_fit(sizes, self.length)
        return rows, np.cumsum(np.bincount(rows))

    @property
    def rows_per_epoch(self) -> int:
        return len(self._packing[1])

    @property
    def packing_efficiency(self) -> float:
        return int(self.lengths.sum()) / (self.rows_per_epoch * self.length)

    def pieces(self, row: int) -> list[DocumentSlice]:
        epoch, index = divmod(row, self.rows_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = self._arrange(epoch)
        _, order, by_row, rows = self._epoch
        chosen = int(rows[index])
        ends = self._packing[1]
        inside = by_row[(int(ends[chosen - 1]) if chosen else 0) : int(ends[chosen])]
        documents, starts, counts = self._pieces
        return [DocumentSlice(int(documents[i]), int(starts[i]), int(counts[i])) for i in order[inside]]

    def _arrange(self, epoch: int) -> tuple[int, Ints, Ints, Ints]:
        """Return the epoch, its order of pieces, the pieces' positions by row, and its order of rows."""
        counts = self._pieces[2]
        # A stable sort of shuffled pieces: the lengths come as in `_packing`, equal lengths in the epoch's order.
        mixed = shuffle(len(counts), self.seed, epoch, 0)
        order = mixed[np.argsort(-counts[mixed], kind="stable")]
        by_row = np.argsort(self._packing[0], kind="stable")
        return epoch, order, by_row, shuffle(self.rows_per_epoch, self.seed, epoch, 1)


RowPlan = JoinedRows | PackedRows


def plan_rows(lengths: Ints, length: int, kind: RowKind, seed: int) -> RowPlan:
    """Return the plan for documents of these lengths; empty documents are in no row."""
    if not int(lengths.sum()):
        raise DataError("there are no tokens to make rows of: all documents are empty")
    return PackedRows(lengths, length, seed) if kind == "packed" else JoinedRows(lengths, length, seed)


def best_fit(sizes: Ints, length: int) -> Ints:
    """Return the row of each piece, sizes falling: each goes where it leaves the least free space, else into a new row.

    Equal sizes are placed together: a million documents take as many steps as there are different sizes and free spaces.
    """
    rows = np.empty(len(sizes), np.int64)
    values, counts = np.unique(sizes, return_counts=True)
    space = _FreeSpace(length)
    at = opened = 0
    for size, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            free = space.smallest(size)
            each = (length if free is None else free) // size
            # Several pieces of one size may go into one row, and many rows have the same free space.
            needed = -(-left // each)
            if free is None:
                chosen = list(range(opened, opened + needed))
                opened, free = opened + needed, length
            else:
                chosen = space.take(free, needed)
            placed = min(left, len(chosen) * each)
            rows[at : at + placed] = np.repeat(chosen, each)[:placed] if placed > 1 else chosen[0]
            # Pieces that the last row has not got.
            short = len(chosen) * each - placed
            space.put(free - each * size, chosen if not short else chosen[:-1])
            if short:
                space.put(free - (each - short) * size, chosen[-1:])
            at, left = at + placed, left - placed
    return rows


class _FreeSpace:
    """Rows by their free tokens; finds the smallest free space that fits a size in a few operations on two bitmaps.

    Bit `free` of the words is set if there are rows with `free` tokens left; bit i of the summary if word i is not 0.
    """

    def __init__(self, length: int) -> None:
        self._rows: dict[int, list[int]] = {}
        self._words = [0] * (length // _WORD + 1)
        self._summary = 0

    def smallest(self, size: int) -> int | None:
        """Return the smallest free space of at least `size`; None if no row has it."""
        word, bit = divmod(size, _WORD)
        here = self._words[word] >> bit
        if here:
            # x & -x keeps the lowest bit that is set.
            return size + (here & -here).bit_length() - 1
        above = self._summary >> (word + 1)
        if not above:
            return None
        word += (above & -above).bit_length()
        found = self._words[word]
        return word * _WORD + (found & -found).bit_length() - 1

    def take(self, free: int, count: int) -> list[int]:
        """Remove and return up to `count` rows with `free` tokens left."""
        rows = self._rows[free]
        chosen = rows[-count:]
        del rows[-count:]
        if not rows:
            word, bit = divmod(free, _WORD)
            self._words[word] &= ~(1 << bit)
            if not self._words[word]:
                self._summary &= ~(1 << word)
        return chosen

    def put(self, free: int, rows: list[int]) -> None:
        """Add rows with `free` tokens left."""
        if not free or not rows:
            return
        self._rows.setdefault(free, []).extend(rows)
        word, bit = divmod(free, _WORD)
        self._words[word] |= 1 << bit
        self._summary |= 1 << word
