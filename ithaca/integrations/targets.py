"""Labels that are targets here and labels that are not, settled where batches are made.

A document's first token, and a row's first after padding, is nobody's target: what stands before it belongs to another
document. Trainer counts labels before the model sees them and divides the loss by that count, so labels that will not
be learned have to be -100 by then. The loader does that; the user's collator stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ithaca.constants import IGNORE_INDEX
from ithaca.errors import BatchError
from ithaca.sequence.batch import read_documents


@dataclass(frozen=True)
class LearnedOnly:
    """In place of a loader's `collate_fn`: its batch, with -100 for labels that are nobody's target."""

    collate: Callable[[Any], Any]

    def __call__(self, examples: Any) -> Any:
        batch = self.collate(examples)
        if not _readable(batch):
            return batch
        first = first_tokens(batch)
        if not (first & (batch["labels"] != IGNORE_INDEX)).any():
            return batch
        return type(batch)(
            {**batch, "labels": batch["labels"].masked_fill(first.to(batch["labels"].device), IGNORE_INDEX)}
        )


def first_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Where a token follows another document's or padding, [B, S]; never at the first place, which nobody counts."""
    documents_BS = read_documents(named_once(batch), batch["input_ids"])
    first = torch.zeros_like(documents_BS, dtype=torch.bool)
    first[:, 1:] = (documents_BS[:, 1:] != documents_BS[:, :-1]) | (documents_BS[:, 1:] < 0)
    return first


def named_once(batch: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's padding-free collator names the documents twice: as `cu_seq_lens_q` and as `seq_idx`."""
    ends, index = batch.get("cu_seq_lens_q"), batch.get("seq_idx")
    if ends is None or index is None:
        return dict(batch)
    sizes = ends.flatten().diff()
    said = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    if not torch.equal(said, index.flatten().to(said)):
        raise BatchError("cu_seq_lens_q and seq_idx name different documents: pass one of them")
    return {key: value for key, value in batch.items() if key != "seq_idx"}


def _readable(batch: Any) -> bool:
    """Whether this is a batch of token rows; what else a loader may carry is none of ours."""
    if not isinstance(batch, Mapping):
        return False
    ids, labels = batch.get("input_ids"), batch.get("labels")
    return (
        isinstance(ids, Tensor)
        and isinstance(labels, Tensor)
        and ids.dim() == 2
        and ids.shape == labels.shape
        and ids.numel() > 0
    )
