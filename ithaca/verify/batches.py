"""Batches of `ithaca verify`: tokens of the user's data, or random ones, in every layout that is easy to get wrong.

Each batch is a plain Hugging Face batch, so that transformers alone can run it too. A document's first token is never
a target, because transformers would train the previous document's last token on it. Lengths are odd: no degree divides
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ithaca.constants import IGNORE_INDEX

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens to make batches of. `ids_T`: one stretch of tokens. `rows`: the first rows of the run's own feed, shortened.

    `length`: tokens of the longest batch. `origin`: the source of the tokens, in words.
    """

    ids_T: Tensor
    length: int
    rows: tuple[Batch, ...] = ()
    origin: str = "made-up tokens"

    @property
    def plain(self) -> list[Batch]:
        """The user's own rows; one row of one document if there are none."""
        return list(self.rows) or [self._cut(1, self.length)]

    @property
    def right_padded(self) -> Batch:
        return self._padded(left=False)

    @property
    def left_padded(self) -> Batch:
        return self._padded(left=True)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Documents of `packed` as (start, end): uneven, one of a single token."""
        bounds = [0, 2 * self.length // 5, 2 * self.length // 5 + 1, 3 * self.length // 5, self.length]
        return list(pairwise(bounds))

    @property
    def packed(self) -> Batch:
        """One row of four documents."""
        batch = self._cut(1, self.length, at=3)
        positions = torch.cat([torch.arange(end - start) for start, end in self.spans])[None]
        labels = batch["labels"].masked_fill(positions == 0, IGNORE_INDEX)
        return {**batch, "labels": labels, "position_ids": positions}

    def bounded(self, shards: int, *, firsts: bool) -> Batch:
        """Return three rows with different document bounds; for two shards of five tokens, a letter for every document:

            abbbb|cdddd     a document begins on every shard's bound, one of a single token among them
            abbbb|bbbbc     one document over all shards, single tokens before and after it
            aaaab|bcccc     a document of two tokens over every bound

        `firsts`: first tokens of documents have labels, which no other document may be trained on. transformers does
        not train on them either if documents run one by one.
        """
        size = self.length // shards
        bounds = [index * size for index in range(1, shards)]
        end = size * shards
        starts = [
            [0, 1, *bounds, *(bound + 1 for bound in bounds)],
            [0, 1, end - 1],
            [0, *(bound - 1 for bound in bounds), *(bound + 1 for bound in bounds)],
        ]
        batch = self._cut(len(starts), end, at=19)
        count = torch.arange(end)
        positions = torch.stack([count - _document_starts(sorted(set(row)), end) for row in starts])
        labels = batch["labels"]
        labels = torch.where(positions == 0, batch["input_ids"] if firsts else IGNORE_INDEX, labels)
        return {**batch, "labels": labels, "position_ids": positions}

    def padded_shards(self, shards: int) -> Batch:
        """Return two rows: the whole first shard is padding in one, the whole last shard in the other."""
        size = self.length // shards
        batch = self._cut(2, size * shards, at=23)
        mask = torch.ones(2, size * shards, dtype=torch.long)
        mask[0, :size] = 0
        mask[1, -size:] = 0
        return {**batch, "labels": _mask_labels(batch["labels"], mask), "attention_mask": mask}

    @property
    def learned_at_the_end(self) -> Batch:
        """One row whose only targets are its last two tokens: the other shards have none."""
        batch = self._cut(1, self.length, at=5)
        labels = batch["input_ids"].clone()
        labels[:, :-2] = IGNORE_INDEX
        return {**batch, "labels": labels}

    @property
    def unequal(self) -> list[Batch]:
        """Micro-batches with very unequal numbers of targets; one has three tokens, fewer than some ranks."""
        return [self.learned_at_the_end, self._cut(2, self.length - 4, at=7), self._cut(1, 3, at=11)]

    def from_position(self, first: int) -> Batch:
        """Return one document whose positions count from `first`."""
        batch = self._cut(1, self.length, at=13)
        return {**batch, "position_ids": first + torch.arange(self.length)[None]}

    def _padded(self, *, left: bool) -> Batch:
        """Return two rows, a third of the second padding."""
        batch = self._cut(2, self.length - 2, at=17)
        length = self.length - 2
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, slice(0, length // 3) if left else slice(length - length // 3, length)] = 0
        return {**batch, "labels": _mask_labels(batch["labels"], mask), "attention_mask": mask}

    def _cut(self, rows: int, length: int, at: int = 0) -> Batch:
        """Return `rows` of `length` tokens from index `at` on, wrapping around; about a fifth are no targets."""
        ids = self.ids_T[(torch.arange(rows * length) + at) % len(self.ids_T)].view(rows, length)
        draw = torch.Generator().manual_seed(at)
        keep = torch.rand(rows, length, generator=draw) < 0.8
        keep[:, -1] = True
        return {"input_ids": ids, "labels": ids.masked_fill(~keep, IGNORE_INDEX)}


def _mask_labels(labels: Tensor, mask: Tensor) -> Tensor:
    """Return labels with -100 on padding and on the first real token."""
    return labels.masked_fill((mask == 0) | (mask.cumsum(1) == 1), IGNORE_INDEX)


def _document_starts(starts: list[int], end: int) -> Tensor:
    """Return the start of every token's document."""
    return torch.cat([torch.full((after - start,), start) for start, after in pairwise([*starts, end])])


def made_up(vocabulary: int, length: int, seed: int = 0) -> Sample:
    """Return a sample of random tokens."""
    draw = torch.Generator().manual_seed(seed)
    return Sample(torch.randint(min(3, vocabulary - 1), vocabulary, (4 * length,), generator=draw), length)


def from_rows(rows: Iterable[Mapping[str, Tensor]], vocabulary: int, length: int, origin: str) -> Sample:
    """Return a sample of a feed's rows ([1, S] each, `document_ids` -1 on padding); ids wrap around at `vocabulary`."""
    own = tuple(_as_huggingface_batch(row, vocabulary) for row in rows)
    ids_T = torch.cat([row["input_ids"][0] for row in own])
    learned = tuple(row for row in own if (row["labels"] != IGNORE_INDEX).any())
    return Sample(ids_T, length, learned, origin)


def _as_huggingface_batch(row: Mapping[str, Tensor], vocabulary: int) -> Batch:
    """Return a row without padding; documents are marked by positions that restart, which transformers understands."""
    real = row["document_ids"] >= 0
    documents = row["document_ids"][real][None]
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents.diff(dim=1) != 0
    count = torch.arange(documents.shape[1])[None]
    positions = count - torch.where(starts, count, 0).cummax(1).values
    labels = row["labels"][real][None]
    labels = torch.where(labels == IGNORE_INDEX, labels, labels % vocabulary).masked_fill(starts, IGNORE_INDEX)
    return {"input_ids": row["input_ids"][real][None] % vocabulary, "labels": labels, "position_ids": positions}
