"""Rows for the trainer, found by number: `feed.row(i)` is the same on every rank and at every degree.

A feed of stored documents needs no state but the number; a streaming feed has a state that goes into checkpoints.

Invariant: rows depend on the documents, the length, the kind of rows and the seed, never on degrees.
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
    """Source of the trainer's rows."""

    @property
    def rows_per_epoch(self) -> int | None:
        """Number of rows in an epoch; None for a stream, whose end is not known before it is read."""

    @property
    def packing_efficiency(self) -> float:
        """Share of tokens that are not padding."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about files that have changed since the feed's state was saved."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Lines about rows that were no documents when the feed read them."""

    def row(self, index: int) -> dict[str, Tensor]:
        """Return `input_ids`, `labels` and `document_ids`, int64, [1, length] each."""

    def describe(self, index: int) -> str:
        """Return the documents of a row, for error messages."""

    def state(self, index: int) -> dict[str, Any]:
        """Return the state, plain JSON, from which `open_feed` continues at `row(index)`."""


def open_feed(
    prepared: Prepared,
    *,
    length: int,
    rows: RowKind,
    seed: int,
    split: Split = "train",
    state: Mapping[str, Any] | None = None,
) -> Feed:
    """Open the rows of a split. `state`: a state that `Feed.state` returned; only streaming feeds need it."""
    if split == "validation" and not prepared.has_validation:
        raise DataError("nothing is held back for validation: set validation.share or validation.sources")
    # Validation sources of their own are always stored, also beside a stream.
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
