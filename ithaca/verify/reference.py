"""The reference: loss, logits and every gradient of one process with plain transformers and eager attention.

`batches[d]` are the micro-batches of data rank d; the loss is the token mean over all of them.

Rows of one micro-step go through the model together where their shapes allow it, because a router's auxiliary loss
depends on the rows beside it. Packed documents run one by one, because not every architecture of transformers keeps
documents apart (gpt_oss does not). Where a document's result depends on the others in its row (an auxiliary loss, a RoPE
that looks at the longest position) the packed row stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ithaca.models.rope import depends_on_length
from ithaca.sequence.batch import count_targets, read_documents
from ithaca.sequence.layout import SequenceLayout, Span

Batch = Mapping[str, Any]
_LOGITS_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
_LOSS_ARGUMENTS = (*_LOGITS_ARGUMENTS, "labels", "output_router_logits")


@dataclass(frozen=True, slots=True)
class Reference:
    """Loss, logits of every batch (`[B, S, V]`, by data rank and micro-batch) and gradients of one process."""

    loss: float
    logits: list[list[Tensor]]
    gradients: dict[str, Tensor]


def reference(model: PreTrainedModel, batches: Sequence[Sequence[Batch]]) -> Reference:
    """Run `model` forward and backward over all micro-batches of all data ranks; gradients are added to its own."""
    model.set_attn_implementation("eager")
    routes, whole = _has_router_loss(model), runs_whole(model)
    steps = [_join_rows([own[i] for own in batches if i < len(own)]) for i in range(max(map(len, batches)))]
    count = max(sum(count_targets(batch) for own in batches for batch in own), 1)
    total = 0.0
    for call in (single for rows in steps for batch in rows for single in _split_documents(batch, whole)):
        weight = count_targets(call) / count
        # A batch without targets has a loss of NaN, and a gradient through its routers alone.
        if not weight and not routes and not call.get("output_router_logits"):
            continue
        loss = model(**_arguments(call, _LOSS_ARGUMENTS), use_cache=False).loss * weight
        loss.backward()
        total += float(loss.detach())
    with torch.no_grad():
        logits = [[_logits(model, batch, whole) for batch in own] for own in batches]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(total, logits, gradients)


def runs_whole(model: torch.nn.Module) -> bool:
    """True if packed rows go through the reference whole, because a document's result depends on the others."""
    return _has_router_loss(model) or any(depends_on_length(module) for module in model.modules())


def _has_router_loss(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def _arguments(batch: Batch, names: Sequence[str]) -> dict[str, Any]:
    return {name: batch[name] for name in names if batch.get(name) is not None}


def _join_rows(batches: list[Batch]) -> list[Batch]:
    """Return one batch with the rows of all of them, or the batches as they are if their shapes differ."""
    first = batches[0]
    shapes = {tuple((key, getattr(batch[key], "shape", None)) for key in batch) for batch in batches}
    if len(batches) == 1 or len(shapes) > 1:
        return batches
    return [{k: torch.cat([b[k] for b in batches]) if isinstance(first[k], Tensor) else first[k] for k in first}]


def _split_documents(batch: Batch, whole: bool) -> list[Batch]:
    """Return the documents of a packed batch as batches of one row; any other batch, or all if `whole`, unchanged."""
    if batch.get("position_ids") is None or batch.get("output_router_logits") or whole:
        return [batch]
    return [
        {key: value[row : row + 1, start:end] for key, value in batch.items() if isinstance(value, Tensor)}
        for row, spans in enumerate(_spans(batch))
        for start, end in spans
    ]


def _spans(batch: Batch) -> tuple[tuple[Span, ...], ...]:
    """Return the token range (start, end) of every document, row by row."""
    documents_BS = read_documents(batch, batch["input_ids"])
    return SequenceLayout.packed(documents_BS, shards=1, max_position=0).documents


def _logits(model: PreTrainedModel, batch: Batch, whole: bool) -> Tensor:
    """Return the logits, `[B, S, V]`; padding between documents that run one by one gets zeros."""
    singles = _split_documents(batch, whole)
    logits = [model(**_arguments(single, _LOGITS_ARGUMENTS), use_cache=False).logits for single in singles]
    if singles[0] is batch:
        return logits[0]
    joined_BSV = logits[0].new_zeros(*batch["input_ids"].shape, logits[0].shape[-1])
    spans = [(row, span) for row, spans in enumerate(_spans(batch)) for span in spans]
    for (row, (start, end)), document in zip(spans, logits, strict=True):
        joined_BSV[row, start:end] = document[0]
    return joined_BSV
