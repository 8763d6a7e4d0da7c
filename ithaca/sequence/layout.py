"""`SequenceLayout`: document spans, padding and shards of a batch, in plain integers.

A row of 10 tokens with two documents and padding, over 4 shards:

    token        0  1  2 | 3  4  5 | 6  7  8 | 9  .  .      padded to 12, shard length L = 3
    document     A  A  A   A  B  B   B  B  -   -  -  -      documents ((0, 4), (4, 8)); the rest is padding
    shard        0         1         2         3            token t is on shard t // L

The layout is computed once from the whole batch, the same on every rank of a sequence group, and frozen. Masks,
positions and labels all follow from it, so they cannot disagree. Documents never attend to each other. No token attends
to padding, and padding counts in no loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ithaca.arguments import check_count, shown
from ithaca.errors import BatchError

Span = tuple[int, int]
# Rule for the attention of queries at padding; see attention/padding_queries.py.
Padding = Literal["zero", "masked", "averaged"]


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Layout of one batch. `documents[b]` are the (start, end) spans of row b, in order, over the padded row.

    `padding`: attention's output at padding is zero, or that of transformers.
    """

    length: int
    padded: int
    shards: int
    documents: tuple[tuple[Span, ...], ...]
    max_position: int
    padding: Padding = "zero"

    @classmethod
    def whole_rows(cls, batch: int, length: int, shards: int) -> SequenceLayout:
        """Return the layout of a plain batch, in which every row is one document."""
        check_count("shards", shards)
        check_count("batch", batch, 0)
        check_count("length", length, 0)
        if batch < 1 or length < 1:
            raise BatchError(f"a batch of {batch} rows of {length} tokens is empty: at least one token is needed")
        return cls(length, _round_up(length, shards), shards, (((0, length),),) * batch, length - 1)

    @classmethod
    def packed(cls, documents_BS: Tensor, shards: int, max_position: int) -> SequenceLayout:
        """Return the layout of a document number per token, [B, S], negative for padding."""
        if not isinstance(documents_BS, Tensor) or documents_BS.dim() != 2:
            found = list(documents_BS.shape) if isinstance(documents_BS, Tensor) else shown(documents_BS)
            raise BatchError(f"documents_BS is {found}: a tensor [B, S] of a document number per token is needed")
        check_count("shards", shards)
        batch, length = documents_BS.shape
        rows = tuple(_spans(documents_BS[b], b) for b in range(batch))
        return cls(length, _round_up(length, shards), shards, rows, max_position)

    @property
    def batch(self) -> int:
        return len(self.documents)

    @property
    def shard_length(self) -> int:
        return self.padded // self.shards

    @property
    def longest(self) -> int:
        return max((end - start for row in self.documents for start, end in row), default=0)

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(end - start for row in self.documents for start, end in row)

    @property
    def uniform(self) -> bool:
        """True if all rows have the same spans, so that one kernel call can take the whole batch."""
        return all(row == self.documents[0] for row in self.documents[1:])

    def shard(self, rank: int) -> slice:
        """Return the slice of the padded row that is on `rank`."""
        return slice(rank * self.shard_length, (rank + 1) * self.shard_length)


def _round_up(length: int, shards: int) -> int:
    return -(-length // shards) * shards


def _spans(documents_S: Tensor, row: int) -> tuple[Span, ...]:
    """Return the spans of equal, non-negative numbers; refuse a number that occurs in two spans."""
    values, counts = torch.unique_consecutive(documents_S, return_counts=True)
    ends = counts.cumsum(0)
    kept = values >= 0
    numbers = values[kept]
    if numbers.unique().numel() != numbers.numel():
        number = next(n for n in numbers.tolist() if (numbers == n).sum() > 1)
        raise BatchError(
            f"row {row}: document {number} is not in one piece (padding or another document lies inside it): "
            "padding may stand left, right or between documents only"
        )
    starts = (ends - counts)[kept].tolist()
    return tuple(zip(starts, ends[kept].tolist(), strict=True))
