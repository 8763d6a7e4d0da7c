"""Collator for plain loops: examples of any length in, one batch of tensors out.

The collator pads to the longest example (or to `length`), packs if asked, and adds positions that restart in every
document. Padding is masked; in packed rows, whose documents transformers separates only without a mask, padding is -1
in `document_ids`. The batch means the same to plain transformers and to `causal_loss`: the label of a document's first
token is -100, so neither learns that token from the document before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ithaca.arguments import check_count, check_flag, named_arguments, shown
from ithaca.constants import IGNORE_INDEX
from ithaca.errors import BatchError
from ithaca.sequence.documents import read_ids


@named_arguments
@dataclass(frozen=True, slots=True)
class SequenceCollator:
    """Collator of examples. `pack=True` lays them end to end in rows of at most `length` tokens, by first fit.

    Without `length` a packed batch is one row, an unpacked one is as long as its longest example.
    Examples longer than `length` are refused, not cut.
    """

    pack: bool = False
    length: int | None = None
    pad_token_id: int = 0
    multiple_of: int = 1

    def __post_init__(self) -> None:
        check_flag("pack", self.pack)
        if self.length is not None:
            check_count("length", self.length, instead=", or None")
        check_count(
            "pad_token_id", self.pad_token_id, 0, ", such as tokenizer.pad_token_id or, without one, eos_token_id"
        )
        check_count("multiple_of", self.multiple_of)

    def __call__(self, examples: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
        if isinstance(examples, Mapping | str | Tensor) or not isinstance(examples, Iterable):
            raise BatchError(f"the collator got {shown(examples)}: pass a list of examples, each a dict with input_ids")
        examples = list(examples)
        if not examples:
            raise BatchError("the collator got no examples: a batch needs at least one")
        documents = [self._document(example, index) for index, example in enumerate(examples)]
        rows = self._pack(documents) if self.pack else [[document] for document in documents]
        longest = max(sum(len(ids) for ids, _ in row) for row in rows)
        width = max(longest, self.length or 0)
        width = -(-width // self.multiple_of) * self.multiple_of
        columns = [self._row(row, width) for row in rows]
        batch = {key: torch.stack([column[key] for column in columns]) for key in columns[0]}
        if batch["attention_mask"].all():
            del batch["attention_mask"]
        elif any(len(row) > 1 for row in rows):
            # With a mask transformers takes a packed row for one document; without a mask the position ids give the
            # documents, and each padding token is a document that no token attends to or learns.
            real = batch.pop("attention_mask").bool()
            starts = torch.nn.functional.pad(batch["position_ids"].diff(dim=1) != 1, (1, 0), value=False)
            batch["document_ids"] = starts.cumsum(1).masked_fill(~real, -1)
        return batch

    def _document(self, example: Mapping[str, Any], index: int) -> tuple[Tensor, Tensor]:
        if not isinstance(example, Mapping):
            raise BatchError(f"example {index} is {shown(example)}: a dict with input_ids is needed")
        if "input_ids" not in example:
            raise BatchError(f"example {index} has no input_ids, only {', '.join(map(str, example)) or 'nothing'}")
        ids = read_ids(example["input_ids"], f"example {index}: input_ids")
        own = example.get("labels")
        labels = ids.clone() if own is None else read_ids(own, f"example {index}: labels").clone()
        if ids.dim() != 1 or ids.shape != labels.shape or not len(ids):
            raise BatchError(
                f"example {index}: input_ids {list(ids.shape)} and labels {list(labels.shape)} must be equally long lists"
            )
        if self.length is not None and len(ids) > self.length:
            raise BatchError(f"example {index} has {len(ids)} tokens, rows have {self.length}: cut it or raise length")
        labels[0] = IGNORE_INDEX
        return ids, labels

    def _pack(self, documents: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
        if self.length is None:
            return [documents]
        rows: list[list[tuple[Tensor, Tensor]]] = []
        free: list[int] = []
        for document in documents:
            size = len(document[0])
            row = next((r for r, tokens in enumerate(free) if tokens >= size), len(rows))
            if row == len(rows):
                rows.append([])
                free.append(self.length)
            rows[row].append(document)
            free[row] -= size
        return rows

    def _row(self, row: list[tuple[Tensor, Tensor]], width: int) -> dict[str, Tensor]:
        ids = torch.cat([ids for ids, _ in row])
        labels = torch.cat([labels for _, labels in row])
        positions = torch.cat([torch.arange(len(ids)) for ids, _ in row])
        pad = (0, width - len(ids))
        pad_row = torch.nn.functional.pad
        return {
            "input_ids": pad_row(ids, pad, value=self.pad_token_id),
            "labels": pad_row(labels, pad, value=IGNORE_INDEX),
            "position_ids": pad_row(positions, pad, value=0),
            "attention_mask": pad_row(torch.ones_like(ids), pad, value=0),
        }
