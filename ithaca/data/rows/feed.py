"""Rows for the trainer, found by their number: `feed.row(i)` is the same on every rank and at every degree.

A feed of stored documents needs no state but the number; a streaming one gives one for checkpoints.

Invariant: which rows there are depends on the documents, the length, the kind of rows and the seed, never on degrees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ithaca.data.prepared import Prepared, Split
from ithaca.data.rows.packing import RowKind, plan_rows
from ithaca.data.rows.stored_rows import StoredFeed
from ithaca.data.rows.streamed_rows import StreamFeed
from ithaca.errors import DataError


class Feed(Protocol):
    """What the trainer takes rows from."""

    @property
    def rows_per_epoch(self) -> int | None:
        """None where the end is not known before it is reached."""

    @property
    def fill(self) -> float:
        """The share of tokens that are not padding."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell of documents that are not as they were when the feed's state was taken."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """What to tell of rows that turned out to be no documents while the feed read them."""

    def row(self, index: int) -> dict[str, Tensor]:
        """`input_ids`, `labels` and `document_ids`, int64, [1, length] each."""

    def describe(self, index: int) -> str:
        """Which documents a row holds, for notes on errors."""

    def state(self, index: int) -> dict[str, Any]:
        """What `open_feed` needs, beside the settings, so that `row(index)` can be read next; plain JSON."""


def open_feed(
    prepared: Prepared,
    *,
    length: int,
    rows: RowKind,
    seed: int,
    split: Split = "train",
    state: Mapping[str, Any] | None = None,
) -> Feed:
    """Rows of `length` tokens. `state` is what `Feed.state` gave, and only streaming feeds need it."""
    if split == "validation" and not prepared.has_validation:
        raise DataError("nothing is held back for validation: set validation.share or validation.sources")
    if prepared.streamed is not None and not (split == "validation" and prepared.others):
        return StreamFeed(
            prepared.streamed,
            length=length,
            kind=rows,
            seed=seed,
            pad=prepared.pad,
            validation=split == "validation",
            state=state,
        )
    stores, documents = prepared.documents(split)
    if not len(documents):
        raise DataError(
            f"no document is left for {split} at validation.share={prepared.share:g}: set another share, or "
            "validation.sources"
        )
    sizes = np.concatenate([store.lengths for store in stores])[documents]
    firsts = np.cumsum([0, *(store.about["documents"] for store in stores)])[:-1].astype(np.int64)
    return StoredFeed(stores, documents, firsts, plan_rows(sizes, length, rows, seed), length, prepared.pad)
