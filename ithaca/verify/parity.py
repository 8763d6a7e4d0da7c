"""Parity: loss, logits and every gradient, sequence-parallel against one process with transformers' eager attention.

`compare` runs on every rank of a mesh. Each rank computes the reference for itself (the models are small), then the
parallel way, and gives the errors it sees; the caller takes the worst over ranks. `batches[d]` are the micro-batches
of data rank d.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.mesh import Mesh
from ithaca.models.rope import depends_on_length
from ithaca.parallelize import parallelize
from ithaca.sequence.batch import count_targets, cut_batch, read_documents
from ithaca.sequence.layout import SequenceLayout, Span
from ithaca.state.weights.placement import averages_gradients
from ithaca.verify.fp64 import promoted, relative_error

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
    prepare: Callable[..., PreTrainedModel] = parallelize,
    **options: Any,
) -> Parity:
    """Errors of the parallel way on this rank. `model` is not changed; `options` go to `prepare(model, mesh)`."""
    mode: AbstractContextManager[None] = promoted() if promote else nullcontext()
    with mode:
        expected = reference(copy.deepcopy(model), batches)
        parallel = prepare(copy.deepcopy(model), mesh, **options)
        own = batches[mesh.dp_rank]
        count = count_tokens(own, mesh)
        shown = 0.0
        for batch in own:
            loss = causal_loss(parallel, batch, mesh, count=count)
            loss.backward()
            shown += float(loss.detach())
        if averages_gradients(parallel):
            _average_gradients(parallel, mesh)
        gradients = gradient_errors(parallel, expected.gradients)
        logits = _logits_error(parallel, own, expected.logits[mesh.dp_rank], mesh, evaluate=evaluate)
    loss_error = abs(shown - expected.loss) / max(1.0, abs(expected.loss))
    return Parity(loss_error, logits, gradients)


def reference(model: PreTrainedModel, batches: Sequence[Sequence[Batch]]) -> Reference:
    """transformers alone, eager attention: the token mean over all micro-batches of all data ranks.

    Rows of the same micro-step go through the model together where their shapes allow it, as they would in one
    process with a larger batch: a router's auxiliary loss depends on that. Packed documents are run one by one,
    since not every architecture of transformers keeps them apart itself (gpt_oss does not); only where the result
    depends on the company (an auxiliary loss, a RoPE that looks at the longest) does the packed row go in whole.
    """
    model.set_attn_implementation("eager")
    routes, whole = _routes(model), runs_whole(model)
    steps = [_together([own[i] for own in batches if i < len(own)]) for i in range(max(map(len, batches)))]
    count = max(sum(count_targets(batch) for own in batches for batch in own), 1)
    total = 0.0
    for step in (single for parts in steps for part in parts for single in _apart(part, whole)):
        weight = count_targets(step) / count
        if not weight and not routes and not step.get("output_router_logits"):
            continue
        output = model(**{key: step[key] for key in _FOR_TRANSFORMERS if step.get(key) is not None}, use_cache=False)
        loss = output.loss * weight
        loss.backward()
        total += float(loss.detach())
    with torch.no_grad():
        logits = [[_plain_logits(model, batch, whole) for batch in own] for own in batches]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(total, logits, gradients)


def runs_whole(model: torch.nn.Module) -> bool:
    """True if packed rows go through the reference whole, because a document's result depends on the others."""
    return _routes(model) or any(depends_on_length(module) for module in model.modules())


def _routes(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def _average_gradients(parallel: PreTrainedModel, mesh: Mesh) -> None:
    """What the caller's own wrapper does where weights are theirs."""
    for parameter in parallel.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.world_group)
            parameter.grad /= mesh.world


def _together(parts: list[Batch]) -> list[Batch]:
    keys = parts[0].keys()
    shapes = {tuple((k, getattr(part[k], "shape", None)) for k in part) for part in parts}
    if len(parts) == 1 or len(shapes) > 1:
        return list(parts)
    return [{k: torch.cat([p[k] for p in parts]) if isinstance(parts[0][k], Tensor) else parts[0][k] for k in keys}]


def _apart(batch: Batch, whole: bool) -> list[Batch]:
    """The documents of a packed batch as batches of their own; any other batch as it is, and all if `whole`."""
    if batch.get("position_ids") is None or batch.get("output_router_logits") or whole:
        return [batch]
    return [
        {key: value[row : row + 1, start:end] for key, value in batch.items() if isinstance(value, Tensor)}
        for row, spans in enumerate(_spans(batch))
        for start, end in spans
    ]


def _spans(batch: Batch) -> tuple[tuple[Span, ...], ...]:
    layout = SequenceLayout.packed(read_documents(batch, batch["input_ids"]), shards=1, max_position=0)
    return layout.documents


def _plain_logits(model: PreTrainedModel, batch: Batch, whole: bool) -> Tensor:
    """[B, S, V], zero on padding between documents that were run one by one."""
    singles = _apart(batch, whole)
    keys = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
    logits = [model(**{k: s[k] for k in keys if s.get(k) is not None}, use_cache=False).logits for s in singles]
    if len(singles) == 1 and singles[0] is batch:
        return logits[0]
    joined = logits[0].new_zeros(*batch["input_ids"].shape, logits[0].shape[-1])
    places = [(row, span) for row, spans in enumerate(_spans(batch)) for span in spans]
    for (row, (start, end)), piece in zip(places, logits, strict=True):
        joined[row, start:end] = piece[0]
    return joined


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
