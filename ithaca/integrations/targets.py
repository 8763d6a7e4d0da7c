"""Labels of -100 for tokens that are no target: the first of each document, and the first after padding.

The token before such a token belongs to another document. Trainer counts labels before the model sees them and divides
the loss by that count, so these labels have to be -100 by then. The loader sets them; the user's collator is not
changed.

    documents     0  0  0  1  1  1  1 -1 -1
    labels        a  b  c  d  e  f  g  .  .
    becomes       a  b  c -100 e f  g -100 .
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
class LabelMasker:
    """A loader's `collate_fn`, whose batches then have -100 for labels that are no target."""

    collate: Callable[[Any], Any]

    def __call__(self, examples: Any) -> Any:
        batch = self.collate(examples)
        if not _is_token_batch(batch):
            return batch
        first = first_tokens(batch)
        if not (first & (batch["labels"] != IGNORE_INDEX)).any():
            return batch
        return type(batch)(
            {**batch, "labels": batch["labels"].masked_fill(first.to(batch["labels"].device), IGNORE_INDEX)}
        )


def first_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return a mask [B, S] of tokens after another document or padding; False at position 0, which is never counted."""
    documents_BS = read_documents(named_once(batch), batch["input_ids"])
    first = torch.zeros_like(documents_BS, dtype=torch.bool)
    first[:, 1:] = (documents_BS[:, 1:] != documents_BS[:, :-1]) | (documents_BS[:, 1:] < 0)
    return first


def named_once(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with its documents given once: TRL's padding-free collator gives `cu_seq_lens_q` and `seq_idx`."""
    ends, index = batch.get("cu_seq_lens_q"), batch.get("seq_idx")
    if ends is None or index is None:
        return dict(batch)
    sizes = ends.flatten().diff()
    documents = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    if not torch.equal(documents, index.flatten().to(documents)):
        raise BatchError("cu_seq_lens_q and seq_idx name different documents: pass one of them")
    return {key: value for key, value in batch.items() if key != "seq_idx"}


def _is_token_batch(batch: Any) -> bool:
    """True for a batch of token rows with labels; a loader may yield anything else."""
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
