"""Documents and positions of a whole batch, by the rules of transformers' eager attention.

    document_ids, seq_idx, cu_seqlens    name the documents; position_ids are then positions and no more
    position_ids, no attention_mask      a position that does not follow its left neighbour begins a document
    position_ids and attention_mask      positions and no more: the tokens of a row that the mask keeps are one document

The last two rules are those of `_preprocess_mask_arguments` and `find_packed_sequence_indices` in
transformers.masking_utils (5.16 to 5.23), which look for packed documents only in a call without a mask and without a
cache. Ambiguous calls are refused: a jump of positions in a row that was not packed, a packed row under a mask (one
document for eager attention, several for flash attention), packed rows with a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaca.arguments import shown
from ithaca.constants import IGNORE_INDEX
from ithaca.errors import BatchError, UnsupportedError

DOCUMENTS = ("document_ids", "seq_idx", "cu_seqlens", "cu_seq_lens_q")
_ONE = "name the documents with document_ids or cu_seqlens (one number throughout for one document)"


def read_ids(value: Any, name: str) -> Tensor:
    """Return integers of a batch as an int64 tensor; raise BatchError about `name` if the value has others."""
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise BatchError(f"{name} is {shown(value)}: whole numbers are needed, torch.int64") from None
    if found.numel() and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
        raise BatchError(f"{name} is of {found.dtype}: whole numbers are needed, torch.int64")
    return found.long()


def read_documents(batch: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Return a document number per token on the host, [B, S], -1 on padding."""
    shape = tokens.shape[:2]
    named = _named_documents(batch, shape)
    positions = given_positions(batch, shape)
    real = _real(batch, shape)
    documents = torch.zeros(shape, dtype=torch.long) if named is None else named
    if named is None and positions is not None and real is None:
        documents = _breaks(positions).cumsum(1)
        _refuse_unclear(batch, positions)
    if real is not None:
        documents = documents.masked_fill(~real, -1)
    if positions is not None and (named is not None or real is not None):
        _refuse_restarts(documents, positions, named=named is not None)
    return documents


def read_positions(batch: Mapping[str, Any], tokens: Tensor, documents_BS: Tensor) -> Tensor:
    """Return the given positions; else positions that restart in every named document; else 0, 1, 2, ... along the row."""
    given = given_positions(batch, tokens.shape[:2])
    if given is not None:
        return given
    count = torch.arange(tokens.shape[1]).expand(tokens.shape[:2])
    if not any(batch.get(key) is not None for key in DOCUMENTS):
        return count
    starts = F.pad(documents_BS.diff(dim=1) != 0, (1, 0), value=True)
    return count - torch.where(starts, count, 0).cummax(1).values


def given_positions(batch: Mapping[str, Any], shape: torch.Size) -> Tensor | None:
    """Return the batch's position_ids as [B, S] on the host; None if it has none."""
    value = batch.get("position_ids")
    if value is None:
        return None
    value = read_ids(value, "position_ids").cpu()
    if value.dim() == 1:
        value = value[None]
    if value.dim() != 2 or value.shape[1] != shape[1] or value.shape[0] not in (1, shape[0]):
        raise BatchError(f"position_ids has shape {list(value.shape)}: [B, S] = {list(shape)} is needed")
    if value.min() < 0:
        raise BatchError(f"position_ids has the value {int(value.min())}: positions count from 0")
    return value.expand(shape)


def _breaks(positions_BS: Tensor) -> Tensor:
    """True where a token does not follow its left neighbour."""
    return F.pad(positions_BS.diff(dim=1) != 1, (1, 0), value=False)


def _restarts(positions_BS: Tensor) -> Tensor:
    """True where a position falls back, or stays, to the lowest of its row: how collators begin a document."""
    lowest = positions_BS == positions_BS.min(dim=1, keepdim=True).values
    return F.pad(positions_BS.diff(dim=1) <= 0, (1, 0), value=False) & lowest


def _refuse_unclear(batch: Mapping[str, Any], positions_BS: Tensor) -> None:
    """Refuse positions without a mask that no collator makes, and packed rows beside a cache."""
    breaks = _breaks(positions_BS)
    unclear = (breaks & ~_restarts(positions_BS)) | _all_alone(batch, breaks)
    if unclear.any():
        row, at = (int(x) for x in unclear.nonzero()[0])
        raise BatchError(
            f"position_ids of row {row} go from {int(positions_BS[row, at - 1])} to {int(positions_BS[row, at])} at token "
            f"{at}, where transformers begins a new document in a call without attention_mask: pass an attention_mask of "
            f"ones if the row is one document, or {_ONE}"
        )
    if breaks.any() and batch.get("use_cache"):
        raise BatchError(
            "position_ids restart beside use_cache=True, with which transformers takes a packed row for one document: "
            "leave use_cache out"
        )


def _all_alone(batch: Mapping[str, Any], breaks_BS: Tensor) -> Tensor:
    """True in trained rows of three tokens and more in which every token would be a document."""
    if breaks_BS.shape[1] < 3:
        return torch.zeros_like(breaks_BS)
    labels = batch.get("labels")
    learned = torch.ones_like(breaks_BS) if labels is None else labels.cpu() != IGNORE_INDEX
    if learned.shape != breaks_BS.shape or batch.get("shift_labels") is not None:
        return torch.zeros_like(breaks_BS)
    rows = breaks_BS[:, 1:].all(1) & learned[:, 1:].any(1)
    return breaks_BS & rows[:, None]


def _refuse_restarts(documents_BS: Tensor, positions_BS: Tensor, *, named: bool) -> None:
    """Refuse positions that restart inside a known document, as in a packed row."""
    inside = F.pad((documents_BS.diff(dim=1) == 0) & (documents_BS[:, 1:] >= 0), (1, 0), value=False)
    breaks = _breaks(positions_BS) & inside
    restarts = breaks & _restarts(_padding_last(positions_BS, documents_BS))
    # In a packed row positions count up somewhere, and every break is a restart. Other positions are only positions.
    packed_B = breaks.any(1) & (breaks == restarts).all(1) & (inside & ~breaks).any(1)
    if not packed_B.any():
        return
    row = int(packed_B.nonzero()[0, 0])
    if named:
        raise BatchError(
            f"position_ids of row {row} restart inside a document that cu_seqlens or document_ids call one: they disagree"
        )
    raise BatchError(
        f"position_ids of row {row} restart beside an attention_mask, which is one document to transformers' eager "
        "attention and several to flash attention: for several, leave attention_mask out or name them with document_ids "
        "(-1 on padding) or cu_seqlens; for one, pass positions that do not restart"
    )


def _padding_last(positions_BS: Tensor, documents_BS: Tensor) -> Tensor:
    """Return positions in which padding has the highest one, so that a collator's zeros there begin no document."""
    return positions_BS.masked_fill(documents_BS < 0, int(positions_BS.max()) + 1)


def _named_documents(batch: Mapping[str, Any], shape: torch.Size) -> Tensor | None:
    given = [key for key in DOCUMENTS if batch.get(key) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise BatchError(f"the batch has {' and '.join(given)}: documents are given in one way only")
    value = read_ids(batch[given[0]], given[0]).cpu()
    if given[0] in ("document_ids", "seq_idx"):
        if value.shape != shape:
            raise BatchError(f"{given[0]} has shape {list(value.shape)}: it needs that of the tokens, {list(shape)}")
        return value
    offsets = value.flatten()
    total = shape[0] * shape[1]
    if offsets.numel() < 2 or offsets[0] != 0 or offsets[-1] != total or (offsets.diff() <= 0).any():
        raise BatchError(
            f"{given[0]} must rise from 0 to {total} (the tokens of the batch), got {offsets.tolist()[:8]}"
        )
    documents = torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff()).view(shape)
    if shape[0] > 1 and (documents[1:, 0] == documents[:-1, -1]).any():
        raise BatchError(f"{given[0]}: a document crosses from one row into the next; end documents at {shape[1]}")
    return documents


def _real(batch: Mapping[str, Any], shape: torch.Size) -> Tensor | None:
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        found = f"{mask.dim()}-D, {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedError(
            f"attention_mask is {found}: only 2-D masks of padding are exact under sequence parallelism; "
            "give packed documents as position_ids, cu_seqlens or document_ids"
        )
    if mask.shape != shape:
        raise BatchError(f"attention_mask has shape {list(mask.shape)}: it needs that of the tokens, {list(shape)}")
    mask = mask.cpu()
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise BatchError(
            f"attention_mask has the value {mask.max().item()}: it takes 0 and 1; pass document numbers as document_ids"
        )
    return mask.bool()
