"""Parity: one model sharded over ranks and whole in one process, compared number by number.

    plain transformers, one process (reference.py)   loss   logits [B, S, V]   gradients
    causal_loss on every rank of a mesh              loss   logits [B, L, V]   gradients, gathered
                                                     ------------ errors: Parity ------------

`compare` is for small models: every rank computes the reference by itself, of any number of data ranks. `Pair` is for
models with the user's own widths: rank 0 alone holds the whole model, so two copies fit where two a rank would not.

Invariant: all ranks make the same calls, and a `Pair` returns the same figures on all of them. A failure on rank 0 alone
is raised on every rank.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ithaca.errors import CheckpointError, IthacaError
from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.mesh import Mesh
from ithaca.models.support import base_model
from ithaca.parallelize import parallelize
from ithaca.ranks import gather_objects, on_rank_0
from ithaca.sequence.batch import Shard, shard_batch
from ithaca.state.weights.placement import averages_gradients
from ithaca.verify.fp64 import promoted, relative_error
from ithaca.verify.reference import Batch, reference
from ithaca.verify.tolerances import FLOOR, ParityLimits

Build = Callable[[], PreTrainedModel]
Prepare = Callable[[PreTrainedModel, Mesh], Any]


@dataclass(frozen=True, slots=True)
class Parity:
    """Errors of one comparison; `gradients` by the parameter's name."""

    loss: float
    logits: float
    gradients: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.loss, self.logits, *self.gradients.values())

    @property
    def worst_gradient(self) -> tuple[str, float]:
        """Name and error of the gradient that is furthest off; no name if there are no gradients."""
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    def nearest_limit(self, limits: ParityLimits) -> tuple[str, float, float]:
        """Return name, error and limit of the part that is nearest to its limit, or furthest beyond."""
        name, error = self.worst_gradient
        parts = [
            ("loss", self.loss, limits.loss),
            ("logits", self.logits, limits.logits),
            (f"gradient of {name}", error, limits.gradients),
        ]
        return max(parts, key=lambda part: part[1] / part[2])


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
    """Return the errors that this rank sees; the caller takes the worst over ranks.

    `batches[d]`: micro-batches of data rank d. `model` stays unchanged; `options` go to `prepare(model, mesh)`.
    """
    with promoted() if promote else nullcontext():
        expected = reference(copy.deepcopy(model), batches)
        parallel = prepare(copy.deepcopy(model), mesh, **options)
        own = batches[mesh.dp_rank]
        loss = mean_loss(parallel, own, mesh)
        if averages_gradients(parallel):
            # The caller's own wrapper (DDP, DeepSpeed) would do it.
            for parameter in parallel.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=mesh.world_group)
                    parameter.grad /= mesh.world
        gradients = gradient_errors(parallel, expected.gradients)
        parallel.train(not evaluate)
        pairs = zip(own, expected.logits[mesh.dp_rank], strict=True)
        logits = max(_logits_error(parallel, batch, whole_BSV, mesh) for batch, whole_BSV in pairs)
    return Parity(_loss_error(loss, expected.loss), logits, gradients)


def mean_loss(parallel: Any, batches: Sequence[Batch], mesh: Mesh, *, backward: bool = True) -> float:
    """Return the token mean of a sharded model over micro-batches; gradients are added up."""
    with torch.set_grad_enabled(backward):
        count = count_tokens(batches, mesh)
        total = 0.0
        for batch in batches:
            loss = causal_loss(parallel, batch, mesh, count=count)
            if backward:
                loss.backward()
            total += float(loss.detach())
    return total


def shard_logits(parallel: Any, batch: Batch, mesh: Mesh) -> tuple[Tensor, Shard]:
    """Return the logits of this rank's tokens, `[B, L, V]`, and the shard that they are of."""
    with torch.no_grad():
        shard = shard_batch(batch, mesh)
        return parallel(**shard.inputs).logits, shard


def _logits_error(parallel: Any, batch: Batch, whole_BSV: Tensor, mesh: Mesh) -> float:
    """Return the worst error over this rank's tokens, without padding."""
    got_BLV, shard = shard_logits(parallel, batch, mesh)
    want_BLV = whole_BSV[:, shard.layout.shard(mesh.sequence_rank)]
    # The last shard may be padded beyond the row's end.
    length = want_BLV.shape[1]
    real_BL = shard.real[:, :length].to(whole_BSV.device)
    return relative_error(got_BLV[:, :length].to(whole_BSV.device)[real_BL], want_BLV[real_BL])


def gradient_errors(
    parallel: nn.Module, expected: Mapping[str, Tensor | None], *, floor: float = 1.0
) -> dict[str, float]:
    """Return the error of every gradient, relative to its largest entry and to `floor` at least.

    A gradient that is missing on one side counts as zero there. Every rank takes part: sharded gradients are gathered.
    """
    errors: dict[str, float] = {}
    for name, parameter in parallel.named_parameters():
        got = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        want = expected.get(name)
        if got is None and want is None:
            continue
        if got is None or want is None:
            difference = _largest(got) + _largest(want)
        else:
            difference = _largest(got.to(want.device) - want)
        # A floor of zero comes with gradients of zero.
        error = difference / max(_largest(want), floor, 1e-300)
        errors[name] = inf if isnan(error) else error
    return errors


def _largest(gradient: Tensor | None) -> float:
    """Return the largest absolute entry; 0 if there is none."""
    if gradient is None or not gradient.numel():
        return 0.0
    return float(torch.linalg.vector_norm(gradient.detach(), inf))


def _loss_error(loss: float, reference_loss: float) -> float:
    error = abs(loss - reference_loss) / max(1.0, abs(reference_loss))
    return inf if isnan(error) else error


class Pair:
    """The whole model on rank 0 and the sharded one on all ranks, with the same weights.

    `build` returns the same plain model on every rank; `prepare` parallelizes one copy. `promote`: compute fp64 models in
    fp64 throughout.
    """

    def __init__(self, build: Build, prepare: Prepare, mesh: Mesh, *, promote: bool) -> None:
        self.mesh, self.promote = mesh, promote
        model = build()
        # A longrope computes its second set of frequencies in its first forward, which may be in `prepare`.
        with self.precision():
            self.parallel = prepare(model, mesh)
        self.plain = build().to(mesh.device) if mesh.rank == 0 else None

    @property
    def base(self) -> PreTrainedModel:
        """The sharded transformers model, without what adapters put around it."""
        return base_model(self.parallel)

    @property
    def config(self) -> Any:
        return self.base.config.get_text_config()

    def precision(self) -> AbstractContextManager[None]:
        """Return the context in which both models compute."""
        return promoted() if self.promote else nullcontext()

    def compare(self, batches: Sequence[Batch], *, evaluate: bool = False, logits: bool = True) -> Parity:
        """Return the errors over some micro-batches, the same on all ranks.

        `evaluate`: in eval mode, without backward. `logits`: compare those of every token too, in one more pass.
        """
        self.parallel.zero_grad(set_to_none=True)
        expected_loss, expected_logits = self.on_rank_0(lambda plain: self._reference(plain, batches, evaluate))
        self.parallel.train(not evaluate)
        loss = self.mean_loss(batches, backward=not evaluate)
        gradients = {} if evaluate else self._gradient_errors()
        pairs = zip(batches, expected_logits, strict=True) if logits else []
        with self.precision():
            worst = max((_logits_error(self.parallel, *pair, self.mesh) for pair in pairs), default=0.0)
        self.parallel.train()
        errors = self.gather((_loss_error(loss, expected_loss), worst))
        return Parity(max(error for error, _ in errors), max(error for _, error in errors), gradients)

    def mean_loss(self, batches: Sequence[Batch], *, backward: bool) -> float:
        """Return the sharded model's token mean over micro-batches."""
        with self.precision():
            return mean_loss(self.parallel, batches, self.mesh, backward=backward)

    def shard_logits(self, batch: Batch) -> tuple[Tensor, Shard]:
        """Return the logits of this rank's tokens, `[B, L, V]`, and the shard that they are of."""
        with self.precision():
            return shard_logits(self.parallel, batch, self.mesh)

    def on_rank_0(self, action: Callable[[PreTrainedModel], Any]) -> Any:
        """Run `action` on the whole model; return its result, or raise its error, on every rank."""

        def act() -> Any:
            assert self.plain is not None
            threads = torch.get_num_threads()
            # The other ranks wait: their cores are free, as far as this process may use them.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(max(threads, min(threads * self.mesh.local_ranks, cores)))
            try:
                return action(self.plain)
            finally:
                torch.set_num_threads(threads)

        return on_rank_0(act, self.mesh.world_group, failed=_failed_on_rank_0)

    def gather(self, value: Any) -> list[Any]:
        """Return the value that each rank passes, on every rank."""
        return gather_objects(value, self.mesh.world_group)

    def placed(self, batch: Batch) -> dict[str, Any]:
        """Return the batch on the whole model's device."""
        return {key: x.to(self.mesh.device) if isinstance(x, Tensor) else x for key, x in batch.items()}

    def _reference(
        self, plain: PreTrainedModel, batches: Sequence[Batch], evaluate: bool
    ) -> tuple[float, list[Tensor]]:
        """Run the whole model; CheckpointError if its loss or gradients are not finite."""
        plain.zero_grad(set_to_none=True)
        with self.precision():
            expected = reference(plain.train(not evaluate), [[self.placed(batch) for batch in batches]])
        plain.train()
        largest = max(map(_largest, expected.gradients.values()), default=0.0)
        if not isfinite(expected.loss) or not isfinite(largest):
            # The sharded model is not to blame, and no answer of its own would be right.
            raise CheckpointError(
                f"one process of plain transformers has a loss of {expected.loss:g} and gradients of up to "
                f"{largest:g} with these weights: there is nothing to compare with; start from weights where both are "
                "finite"
            )
        return expected.loss, [logits.cpu() for logits in expected.logits[0]]

    def _gradient_errors(self) -> dict[str, float]:
        """Return the error of every gradient, the same on all ranks: rank 0 has the whole model's."""
        expected = {} if self.plain is None else {name: p.grad for name, p in self.plain.named_parameters()}
        errors = gradient_errors(
            self.parallel, expected, floor=FLOOR * max(map(_largest, expected.values()), default=0.0)
        )
        return on_rank_0(lambda: errors, self.mesh.world_group)


def _failed_on_rank_0(error: Exception) -> Exception:
    if isinstance(error, IthacaError):
        return error
    return RuntimeError(f"one process alone: {type(error).__name__}: {error}")
