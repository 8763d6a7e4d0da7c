"""Rows of stored documents as tensors [1, length]: pieces by the plan, tokens from the stores.

    input_ids       12   7   9   2  31   5   2   0      two documents and one token of padding
    labels        -100   7   9   2 -100   5   2 -100    nothing predicts a document's first token
    document_ids     0   0   0   0   1   1   1  -1

Invariant: padding stands at the end of a row, with label -100 and document -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ithaca.constants import IGNORE_INDEX
from ithaca.data.rows.packing import DocumentSlice, RowPlan
from ithaca.data.rows.shuffle import Ints
from ithaca.data.tokens.store import Store

TokensAndMask = tuple[NDArray[np.int64], NDArray[np.bool_]]


def row_tensors(slices: Sequence[TokensAndMask], length: int, pad: int) -> dict[str, Tensor]:
    """Lay pieces end to end, each a document of its own, and pad them to `length`."""
    ids = np.full(length, pad, np.int64)
    labels = np.full(length, IGNORE_INDEX, np.int64)
    documents = np.full(length, -1, np.int64)
    at = 0
    for number, (tokens, learn) in enumerate(slices):
        end = at + len(tokens)
        ids[at:end] = tokens
        labels[at:end] = np.where(learn, tokens, IGNORE_INDEX)
        labels[at] = IGNORE_INDEX
        documents[at:end] = number
        at = end
    row = {"input_ids": ids, "labels": labels, "document_ids": documents}
    return {name: torch.from_numpy(values)[None] for name, values in row.items()}


def describe_pieces(index: int, pieces: Sequence[tuple[str, DocumentSlice]], most: int = 8) -> str:
    """Return `row 3: docs.jsonl:17 [0:2048], ...`."""
    named = [f"{origin} [{piece.start}:{piece.start + piece.count}]" for origin, piece in pieces[:most]]
    more = [f"and {len(pieces) - most} more"] if len(pieces) > most else []
    return f"row {index}: {', '.join(named + more)}"


@dataclass(frozen=True, slots=True)
class StoredFeed:
    """Rows of prepared documents. `documents`: the split's numbers; `firsts`: number of each store's first document."""

    stores: tuple[Store, ...]
    documents: Ints
    firsts: Ints
    plan: RowPlan
    length: int
    pad: int

    @property
    def rows_per_epoch(self) -> int:
        return self.plan.rows_per_epoch

    @property
    def packing_efficiency(self) -> float:
        return self.plan.packing_efficiency

    @property
    def notes(self) -> tuple[str, ...]:
        # Stored documents do not change while a run is stopped: the trainer compares their fingerprint.
        return ()

    @property
    def left_out(self) -> tuple[str, ...]:
        # Bad rows were reported when the documents were tokenized.
        return ()

    def row(self, index: int) -> dict[str, Tensor]:
        slices = []
        for piece in self.plan.pieces(index):
            store, document = self._find(piece)
            slices.append(store.piece(document, piece.start, piece.count))
        return row_tensors(slices, self.length, self.pad)

    def describe(self, index: int) -> str:
        named = []
        for piece in self.plan.pieces(index):
            store, document = self._find(piece)
            named.append((store.origin(document), piece))
        return describe_pieces(index, named)

    def state(self, index: int) -> dict[str, Any]:
        return {}

    def _find(self, piece: DocumentSlice) -> tuple[Store, int]:
        number = int(self.documents[piece.document])
        store = int(np.searchsorted(self.firsts, number, side="right")) - 1
        return self.stores[store], number - int(self.firsts[store])
