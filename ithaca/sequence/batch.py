"""Sharding of a batch: a whole Hugging Face batch in, this rank's shard out.

`shard_batch` reads ids or embeddings, a 2-D mask, position ids, `cu_seqlens`, document ids and labels, computes the
layout, shifts the labels of the whole row, pads to a multiple of the shard count and cuts. One row over two ranks:

    input_ids       5  6  7 | 8  9  .         rank 0: 5 6 7      rank 1: 8 9 <pad>
    document        A  A  B | B  B  -
    targets         6  -  8 | 9  -  -         rank 0: 6 -100 8   rank 1: 9 -100 -100

The target of a token is the next token's label if that token is in the same document, else -100: a shard's last token
learns the first token of the next shard, and no document learns another's first token. Everything is checked before
anything is sent to a device or a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaca.arguments import check_count, named_arguments
from ithaca.constants import IGNORE_INDEX
from ithaca.errors import BatchError, UnsupportedError
from ithaca.mesh import Mesh, check_mesh
from ithaca.sequence.documents import DOCUMENTS, read_documents, read_positions
from ithaca.sequence.embeddings import cut_embeddings
from ithaca.sequence.layout import SequenceLayout

_TOKENS = ("input_ids", "inputs_embeds")
_LABELS = ("labels", "shift_labels")
# Keys of collators that the layout makes redundant, and flags that change no token.
_REDUNDANT = ("cu_seq_lens_k", "max_length_q", "max_length_k", "use_cache", "return_dict", "num_items_in_batch")
_FLAGS = ("output_router_logits",)
KNOWN_KEYS = (*_TOKENS, *_LABELS, "attention_mask", "position_ids", *DOCUMENTS, *_REDUNDANT, *_FLAGS)


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a batch on one rank: `model(**shard.inputs)` runs it; `targets` [B, L] are already shifted.

    `count`: the number of targets in the whole batch (all shards of this sequence group). `real` [B, L]: False on
    padding. `unlearned`: the number of labels other than -100 on padding and on first tokens of documents.
    """

    inputs: dict[str, Any]
    targets: Tensor
    real: Tensor
    layout: SequenceLayout
    count: int
    unlearned: int = 0

    def on(self, device: torch.device) -> Shard:
        """Return the shard with its tensors on `device`."""
        if self.targets.device == device:
            return self
        inputs = {key: _on(value, device) if isinstance(value, Tensor) else value for key, value in self.inputs.items()}
        return replace(self, inputs=inputs, targets=_on(self.targets, device), real=_on(self.real, device))


@named_arguments
def shard_batch(batch: Mapping[str, Any], mesh: Mesh, *, vocab_size: int | None = None) -> Shard:
    """Lay out, pad and cut a whole batch; every rank of a sequence group passes the same batch."""
    check_mesh(mesh)
    if vocab_size is not None:
        check_count("vocab_size", vocab_size, instead=", or None")
    shard = cut_batch(batch, mesh.shards, mesh.sequence_rank, mesh.device, vocab_size=vocab_size)
    embeds = batch.get("inputs_embeds")
    if embeds is not None and embeds.requires_grad and torch.is_grad_enabled():
        cut = _ShardCutter(shard.layout, mesh.sequence_rank, mesh.device)
        shard.inputs["inputs_embeds"] = cut_embeddings(embeds, partial(cut, fill=None), shard.layout, mesh)
    return shard


def cut_batch(
    batch: Mapping[str, Any], shards: int, rank: int, device: torch.device, *, vocab_size: int | None = None
) -> Shard:
    """Return shard `rank` of `shards`, without a mesh; embeddings get the gradient of the shard's tokens only."""
    tokens = _tokens(batch)
    documents_BS = read_documents(batch, tokens)
    positions_BS = read_positions(batch, tokens, documents_BS)
    targets_BS = _targets(batch, tokens, documents_BS)
    _check_vocabulary(batch, vocab_size)
    layout = SequenceLayout.packed(documents_BS, shards, int(positions_BS.max()))
    cut = _ShardCutter(layout, rank, device)
    name = next(key for key in _TOKENS if batch.get(key) is not None)
    # torch's embedding takes int32 and int64 only.
    whole = tokens if name == "inputs_embeds" else tokens.long()
    inputs = {name: cut(whole, None), "position_ids": cut(positions_BS, 0), "sequence_layout": layout}
    inputs |= {key: batch[key] for key in _FLAGS if batch.get(key) is not None}
    count = int((targets_BS != IGNORE_INDEX).sum())
    labels = batch.get("labels")
    # The warning compares with plain transformers, which takes neither named documents nor shifted labels.
    comparable = not any(batch.get(key) is not None for key in ("shift_labels", *DOCUMENTS))
    unlearned = int((labels[:, 1:].cpu() != IGNORE_INDEX).sum()) - count if labels is not None and comparable else 0
    return Shard(inputs, cut(targets_BS, IGNORE_INDEX), cut(documents_BS, -1) >= 0, layout, count, unlearned)


def count_targets(batch: Mapping[str, Any]) -> int:
    """Return the number of trained tokens of a whole batch, by which `causal_loss` divides."""
    tokens = _tokens(batch)
    return int((_targets(batch, tokens, read_documents(batch, tokens)) != IGNORE_INDEX).sum())


@dataclass(frozen=True, slots=True)
class _ShardCutter:
    """Cuts one rank's shard out of dim 1, padded to the layout's length, and moves only the shard."""

    layout: SequenceLayout
    rank: int
    device: torch.device

    def __call__(self, whole: Tensor, fill: int | None) -> Tensor:
        """Return the shard of `whole`; padding holds `fill`, or the row's last token if `fill` is None."""
        piece = whole[:, self.layout.shard(self.rank)]
        missing = self.layout.shard_length - piece.shape[1]
        if missing and fill is None:
            # A real token, not zeros: a model may divide by a token's standard deviation, which has no finite gradient at 0.
            piece = torch.cat([piece, whole[:, -1:].expand(-1, missing, *whole.shape[2:])], dim=1)
        elif missing:
            piece = F.pad(piece, (0, 0) * (piece.dim() - 2) + (0, missing), value=fill)
        return _on(piece, self.device).contiguous()


def _on(piece: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and piece.device.type == "cpu" and not piece.is_floating_point():
        # A copy of more than 64 KB from unpinned memory blocks the host until the device has finished all earlier work.
        piece = piece.pin_memory()
    return piece.to(device, non_blocking=True)


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return the ids [B, S] or embeddings [B, S, C] of a batch, checked."""
    if not isinstance(batch, Mapping):
        raise BatchError(f"the batch is a {type(batch).__name__}: a dict with input_ids [B, S] is needed")
    unknown = sorted(str(key) for key in batch if key not in KNOWN_KEYS and batch[key] is not None)
    if unknown:
        raise UnsupportedError(
            f"the batch has {unknown[0]!r}, which cannot be sharded: known are {', '.join(KNOWN_KEYS)}"
        )
    given = [key for key in _TOKENS if batch.get(key) is not None]
    if len(given) != 1:
        raise BatchError(
            f"the batch has {' and '.join(given) or 'neither input_ids nor inputs_embeds'}: pass one of them"
        )
    for key in (*given, *_LABELS):
        _check_type(key, batch.get(key))
    tokens: Tensor = batch[given[0]]
    dims = 2 if given[0] == "input_ids" else 3
    if tokens.dim() != dims:
        raise BatchError(
            f"{given[0]} has shape {list(tokens.shape)}: [B, S{', hidden' if dims == 3 else ''}] is needed"
        )
    if tokens.shape[0] == 0 or tokens.shape[1] == 0:
        raise BatchError(f"{given[0]} has shape {list(tokens.shape)}: the batch is empty, at least one token is needed")
    return tokens


def _check_type(key: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise BatchError(f"{key} is a {type(value).__name__}: a tensor is needed, a collator makes one")
    if key != "inputs_embeds" and (value.is_floating_point() or value.dtype == torch.bool):
        raise BatchError(f"{key} is of {value.dtype}: ids are whole numbers, torch.int64")


def _targets(batch: Mapping[str, Any], tokens: Tensor, documents_BS: Tensor) -> Tensor:
    given = [key for key in _LABELS if batch.get(key) is not None]
    name = given[-1] if given else "input_ids"
    if batch.get(name) is None:
        raise BatchError("inputs_embeds come without labels: pass labels [B, S], -100 where nothing is learned")
    labels = batch[name].cpu().long()
    if labels.shape != tokens.shape[:2]:
        raise BatchError(
            f"{name} has shape {list(labels.shape)}: it needs that of the tokens, {list(tokens.shape[:2])}"
        )
    if name == "shift_labels":
        return labels.masked_fill(documents_BS < 0, IGNORE_INDEX)
    same = (documents_BS[:, 1:] == documents_BS[:, :-1]) & (documents_BS[:, 1:] >= 0)
    return F.pad(labels[:, 1:].masked_fill(~same, IGNORE_INDEX), (0, 1), value=IGNORE_INDEX)


def _check_vocabulary(batch: Mapping[str, Any], vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    for key in ("input_ids", *_LABELS):
        if batch.get(key) is None:
            continue
        ids = batch[key].long()
        low, high = (
            int(x) for x in torch.aminmax(ids if key == "input_ids" else ids.masked_fill(ids == IGNORE_INDEX, 0))
        )
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            # An unsigned dtype has no -100: in torch.uint8 it is 156.
            dtype = "" if batch[key].dtype.is_signed else f" in {batch[key].dtype}, which holds no -100"
            raise BatchError(f"{key} has the id {bad}{dtype}: this model's vocabulary is 0 to {vocab_size - 1}")
