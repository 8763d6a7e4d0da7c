"""Batches of every awkward kind, small. Each is a plain Hugging Face batch, so transformers alone can run it too.

Labels of a document's first token are -100 where rows are packed: transformers would otherwise train the last token
of the document before on it, which Ithaca never does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ithaca.verify.small_models.features import small_batch

Batch = dict[str, Tensor]


def plain(rows: int, seed: int) -> Batch:
    """An odd length that no degree divides."""
    return small_batch(rows, 23, seed=seed)


def right_padded(rows: int, seed: int) -> Batch:
    batch = small_batch(rows, 21, seed=seed)
    mask = torch.ones_like(batch["input_ids"])
    for row in range(rows):
        mask[row, 21 - 3 - 5 * row :] = 0
    return _masked(batch, mask)


def left_padded(rows: int, seed: int) -> Batch:
    batch = small_batch(rows, 22, seed=seed)
    mask = torch.ones_like(batch["input_ids"])
    for row in range(rows):
        mask[row, : 4 + 5 * row] = 0
        # transformers would train the last padding token on the row's first; Ithaca counts no padding.
        batch["labels"][row, 4 + 5 * row] = -100
    return _masked(batch, mask)


def packed(rows: int, seed: int) -> Batch:
    """Documents of uneven length, some of one token, other bounds in every row."""
    batch = small_batch(rows, 25, seed=seed)
    lengths = [[9, 1, 1, 8, 6], [1, 12, 2, 10], [25], [5, 5, 5, 5, 5]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths[row % 4]]) for row in range(rows)])
    batch["position_ids"] = positions
    batch["labels"] = batch["labels"].masked_fill(positions == 0, -100)
    return batch


def bounded(rows: int, seed: int) -> Batch:
    """Bounds on every shard's at degrees 2, 3 and 4, beside them, and none; documents' first tokens have labels."""
    batch = small_batch(rows, 24, seed=seed, learned=1.0)
    lengths = [[6, 2, 4, 4, 2, 6], [1, 22, 1], [5, 2, 4, 2, 4, 2, 5]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths[row % 3]]) for row in range(rows)])
    return batch | {"position_ids": positions}


def padded_shards(rows: int, seed: int) -> Batch:
    """Half a row is padding, on the left or on the right: whole shards of it."""
    batch = small_batch(rows, 24, seed=seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[::2, :12] = 0
    mask[1::2, 12:] = 0
    batch["labels"][::2, 12] = -100
    return _masked(batch, mask)


def learned_at_the_end(rows: int, seed: int) -> Batch:
    """Only the last tokens are learned: most shards have nothing but -100."""
    batch = small_batch(rows, 24, seed=seed, learned=1.0)
    batch["labels"][:, :-2] = -100
    return batch


def one_token(rows: int, seed: int) -> Batch:
    """Fewer tokens than ranks: most of every row is padding to the degree."""
    batch = small_batch(rows, 3, seed=seed, learned=1.0)
    return batch


KINDS: dict[str, Callable[[int, int], Batch]] = {
    "plain": plain,
    "right_padded": right_padded,
    "left_padded": left_padded,
    "packed": packed,
    "bounded": bounded,
    "padded_shards": padded_shards,
    "learned_at_the_end": learned_at_the_end,
    "one_token": one_token,
}


def micro_batches(dp: int, rows: int, kinds: list[str], *, experts: bool = False) -> list[list[Batch]]:
    """For every data rank its micro-batches, one of each kind; token counts differ over kinds and ranks."""
    flags = {"output_router_logits": True} if experts else {}
    return [[KINDS[kind](rows, seed=10 * d + i) | flags for i, kind in enumerate(kinds)] for d in range(dp)]


def _masked(batch: Batch, mask: Tensor) -> Batch:
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
