"""`SequenceLayout`: the one truth about a batch's tokens, in plain integers.

Computed once from the whole batch, the same on every rank of a sequence group, and frozen. Masks, positions
and labels all follow from it, so they cannot disagree. A row holds documents, which never attend to each
other; a token that is in no document is padding, is attended by nobody and counts in no loss.
Token t of a row lives on shard t // L, L = padded / shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ithaca.arguments import check_count, shown
from ithaca.errors import BatchError

Span = tuple[int, int]
# The attention of padding's own queries; see attention/padding_queries.py.
Padding = Literal["zero", "masked", "averaged"]


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """`documents[b]` are the (start, end) spans of row b, in order, over the padded row.

    `padding` says what attention gives at padding: zeros, or what transformers gives there.
    """

    length: int
    padded: int
    shards: int
    documents: tuple[tuple[Span, ...], ...]
    max_position: int
    padding: Padding = "zero"

    @classmethod
    def whole_rows(cls, batch: int, length: int, shards: int) -> SequenceLayout:
        """Every row one document: the layout of a plain batch."""
        check_count("shards", shards)
        check_count("batch", batch, 0)
        check_count("length", length, 0)
        if batch < 1 or length < 1:
            raise BatchError(f"a batch of {batch} rows of {length} tokens is empty: at least one token is needed")
        return cls(length, _round_up(length, shards), shards, (((0, length),),) * batch, length - 1)

    @classmethod
    def packed(cls, documents_BS: Tensor, shards: int, max_position: int) -> SequenceLayout:
        """From a document number per token, [B, S], negative where the token is padding."""
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
        """Tokens that are no padding."""
        return sum(end - start for row in self.documents for start, end in row)

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same spans, so that one kernel call can take the whole batch."""
        return all(row == self.documents[0] for row in self.documents[1:])

    def shard(self, rank: int) -> slice:
        """The tokens of the padded row that live on `rank`."""
        return slice(rank * self.shard_length, (rank + 1) * self.shard_length)


def _round_up(length: int, shards: int) -> int:
    return -(-length // shards) * shards


def _spans(documents_S: Tensor, row: int) -> tuple[Span, ...]:
    """The runs of equal, non-negative numbers; a number that comes back after another is refused."""
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
