"""Parity: loss, logits and every gradient, sequence-parallel against one process with transformers' eager attention.

`compare` runs on every rank of a mesh. Each rank computes the reference for itself (the models are small), then the
parallel way, and gives the errors it sees; the caller takes the worst over ranks. `batches[d]` are the micro-batches
of data rank d.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ithaca.mesh import Mesh
from ithaca.parallelize import parallelize
from ithaca.proof.promote import promoted, relative_error
from ithaca.sequence.batch import count_targets, cut_batch
from ithaca.training.step import causal_loss, count_tokens

Batch = Mapping[str, Any]
_FOR_TRANSFORMERS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "output_router_logits")


@dataclass(frozen=True, slots=True)
class Parity:
    """The errors of one comparison, each relative to the largest reference entry (or 1)."""

    loss: float
    logits: float
    gradients: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.loss, self.logits, *self.gradients.values())


@dataclass(frozen=True, slots=True)
class Reference:
    """What one process computes: the loss, the logits of every batch, and the gradients."""

    loss: float
    logits: list[list[Tensor]]
    gradients: dict[str, Tensor]


def compare(
    model: PreTrainedModel,
    batches: Sequence[Sequence[Batch]],
    mesh: Mesh,
    *,
    promote: bool = True,
    evaluate: bool = False,
    **options: Any,
) -> Parity:
    """Errors of the parallel way on this rank. `model` is not changed; `options` go to `parallelize`."""
    mode: AbstractContextManager[None] = promoted() if promote else nullcontext()
    with mode:
        expected = reference(copy.deepcopy(model), batches)
        parallel = parallelize(copy.deepcopy(model), mesh, **options)
        own = batches[mesh.dp_rank]
        count = count_tokens(own, mesh)
        shown = 0.0
        for batch in own:
            loss = causal_loss(parallel, batch, mesh, count=count)
            loss.backward()
            shown += float(loss.detach())
        gradients = gradient_errors(parallel, expected.gradients)
        logits = _logits_error(parallel, own, expected.logits[mesh.dp_rank], mesh, evaluate=evaluate)
    loss_error = abs(shown - expected.loss) / max(1.0, abs(expected.loss))
    return Parity(loss_error, logits, gradients)


def reference(model: PreTrainedModel, batches: Sequence[Sequence[Batch]]) -> Reference:
    """transformers alone, eager attention: the token mean over all micro-batches of all data ranks.

    Rows of the same micro-step go through the model together where their shapes allow it, as they would in one
    process with a larger batch: a router's auxiliary loss depends on that.
    """
    model.set_attn_implementation("eager")
    steps = [_together([own[i] for own in batches if i < len(own)]) for i in range(max(map(len, batches)))]
    count = max(sum(count_targets(batch) for own in batches for batch in own), 1)
    total = 0.0
    for step in (part for parts in steps for part in parts):
        weight = count_targets(step) / count
        if not weight and not step.get("output_router_logits"):
            continue
        output = model(**{key: step[key] for key in _FOR_TRANSFORMERS if step.get(key) is not None}, use_cache=False)
        loss = output.loss * weight
        loss.backward()
        total += float(loss.detach())
    with torch.no_grad():
        logits = [[_plain_logits(model, batch) for batch in own] for own in batches]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(total, logits, gradients)


def _together(parts: list[Batch]) -> list[Batch]:
    keys = parts[0].keys()
    shapes = {tuple((k, getattr(part[k], "shape", None)) for k in part) for part in parts}
    if len(parts) == 1 or len(shapes) > 1:
        return list(parts)
    return [{k: torch.cat([p[k] for p in parts]) if isinstance(parts[0][k], Tensor) else parts[0][k] for k in keys}]


def _plain_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    keys = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
    logits: Tensor = model(**{key: batch[key] for key in keys if batch.get(key) is not None}, use_cache=False).logits
    return logits


def _logits_error(
    parallel: PreTrainedModel, own: Sequence[Batch], expected: list[Tensor], mesh: Mesh, *, evaluate: bool
) -> float:
    """The worst error over this rank's tokens that are no padding."""
    worst = 0.0
    parallel.train(not evaluate)
    with torch.no_grad():
        for batch, whole in zip(own, expected, strict=True):
            shard = cut_batch(batch, mesh.shards, mesh.sequence_rank, mesh.device)
            got = parallel(**shard.inputs).logits
            piece = whole[:, shard.layout.shard(mesh.sequence_rank)]
            kept = shard.real[:, : piece.shape[1]]
            worst = max(worst, relative_error(got[:, : piece.shape[1]][kept], piece[kept]))
    return worst


def gradient_errors(parallel: torch.nn.Module, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Error of every parameter's gradient; one that is missing on either side counts as infinite unless zero."""
    errors: dict[str, float] = {}
    for name, parameter in parallel.named_parameters():
        got = parameter.grad
        if isinstance(got, DTensor):
            got = got.full_tensor()
        want = expected.get(name)
        if got is None or want is None:
            other = want if got is None else got
            if other is not None:
                errors[name] = float("inf") if other.abs().max() > 0 else 0.0
            continue
        errors[name] = relative_error(got, want)
    return errors

