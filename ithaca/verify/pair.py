"""`Pair`: one model twice, whole in one process and sharded over all ranks, compared number by number.

The whole one, transformers alone with eager attention, lives on rank 0 only; its loss and logits are told to the
others, and each gradient is gathered there and compared when it is its turn. So a model with the user's own widths
needs memory for two copies and its gradients, not for two a rank.

Invariant: all ranks make the same calls and get the same answers. A failure of rank 0's alone is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ithaca.errors import CheckpointError, IthacaError
from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.mesh import Mesh
from ithaca.models.support import base_model
from ithaca.ranks import gather_objects, on_rank_0
from ithaca.sequence.batch import Shard, shard_batch
from ithaca.verify.fp64 import promoted, relative_error
from ithaca.verify.parity import reference
from ithaca.verify.tolerances import FLOOR, Limits

Build = Callable[[], PreTrainedModel]
Prepare = Callable[[PreTrainedModel, Mesh], Any]


@dataclass(frozen=True, slots=True)
class Errors:
    """What one comparison showed; `where` names the parameter with the worst gradient."""

    loss: float
    logits: float
    gradients: float
    where: str

    def worst(self, limits: Limits) -> tuple[str, float, float]:
        """The part that is nearest to its limit, or the furthest beyond it: its name, error and limit."""
        parts = [
            ("loss", self.loss, limits.loss),
            ("logits", self.logits, limits.logits),
            (f"gradient of {self.where}", self.gradients, limits.gradients),
        ]
        return max(parts, key=lambda part: part[1] / part[2])


class Pair:
    """`build` gives the same plain model on every rank; `prepare` makes one of them run on shards."""

    def __init__(self, build: Build, prepare: Prepare, mesh: Mesh, *, promote: bool) -> None:
        self.mesh, self.promote = mesh, promote
        model = build()
        # A longrope computes its second set of frequencies when it is first run, which may be here.
        with self.mode():
            self.parallel = prepare(model, mesh)
        self.plain = build().to(mesh.device) if mesh.rank == 0 else None

    @property
    def base(self) -> PreTrainedModel:
        """The sharded one, taken out of what adapters put around it."""
        return base_model(self.parallel)

    @property
    def config(self) -> Any:
        return self.base.config.get_text_config()

    def mode(self) -> AbstractContextManager[None]:
        """Where both models compute."""
        return promoted() if self.promote else nullcontext()

    def compare(self, batches: Sequence[Mapping[str, Any]], *, evaluate: bool = False, logits: bool = True) -> Errors:
        """Errors of the sharded one over some micro-batches. `logits`: those of every token too, in one more pass."""
        self.parallel.zero_grad(set_to_none=True)
        loss, expected = self._expected(batches, evaluate)
        self.parallel.train(not evaluate)
        shown = self.loss(batches, backward=not evaluate)
        gradient, where = (0.0, "") if evaluate else self._gradients()
        compared = zip(batches, expected, strict=True) if logits else []
        apart = max((self._logits(batch, whole) for batch, whole in compared), default=0.0)
        errors = self.gathered((abs(shown - loss) / max(1.0, abs(loss)), apart))
        self.parallel.train()
        return Errors(max(_finite(e[0]) for e in errors), max(_finite(e[1]) for e in errors), gradient, where)

    def loss(self, batches: Sequence[Mapping[str, Any]], *, backward: bool) -> float:
        """The sharded model's mean over micro-batches; its gradients are added up."""
        with self.mode(), torch.set_grad_enabled(backward):
            count = count_tokens(batches, self.mesh)
            total = 0.0
            for batch in batches:
                loss = causal_loss(self.parallel, batch, self.mesh, count=count)
                if backward:
                    loss.backward()
                total += float(loss.detach())
        return total

    def own_logits(self, batch: Mapping[str, Any]) -> tuple[Tensor, Shard]:
        """The logits of this rank's tokens, [B, L, V]."""
        with self.mode(), torch.no_grad():
            shard = shard_batch(batch, self.mesh, vocab_size=self.config.vocab_size)
            return self.parallel(**shard.inputs).logits, shard

    def on_rank_0(self, action: Callable[[PreTrainedModel], Any]) -> Any:
        """What `action` gives for the whole model, told to all ranks."""

        def act() -> Any:
            assert self.plain is not None
            threads = torch.get_num_threads()
            # The other ranks wait: their cores are free.
            torch.set_num_threads(threads * self.mesh.local_ranks)
            try:
                return action(self.plain)
            finally:
                torch.set_num_threads(threads)

        return on_rank_0(act, self.mesh.world_group, failed=_failed_alone)

    def gathered(self, said: Any) -> list[Any]:
        """What every rank says."""
        return gather_objects(said, self.mesh.world_group)

    def _expected(self, batches: Sequence[Mapping[str, Any]], evaluate: bool) -> tuple[float, list[Tensor]]:
        def run(plain: PreTrainedModel) -> tuple[float, list[Tensor]]:
            plain.zero_grad(set_to_none=True)
            with self.mode():
                expected = reference(plain.train(not evaluate), [[self.placed(batch) for batch in batches]])
            plain.train()
            largest = max(map(_largest, expected.gradients.values()), default=0.0)
            if not isfinite(expected.loss) or not isfinite(largest):
                # No answer is right beside it, and the sharded model is not to blame.
                raise CheckpointError(
                    f"one process of plain transformers has a loss of {expected.loss:g} and gradients of up to "
                    f"{largest:g} with these weights: there is nothing to compare with; start from weights where both are "
                    "finite"
                )
            return expected.loss, [logits.cpu() for logits in expected.logits[0]]

        return self.on_rank_0(run)

    def placed(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch where the whole model is."""
        return {key: x.to(self.mesh.device) if isinstance(x, Tensor) else x for key, x in batch.items()}

    def _logits(self, batch: Mapping[str, Any], whole: Tensor) -> float:
        got, shard = self.own_logits(batch)
        piece = whole[:, shard.layout.shard(self.mesh.sequence_rank)]
        real = shard.real[:, : piece.shape[1]].cpu()
        return relative_error(got.cpu()[:, : piece.shape[1]][real], piece[real])

    def _gradients(self) -> tuple[float, str]:
        """The worst error of any gradient and whose it is, the same on all ranks."""
        wanted: dict[str, Tensor | None] = {}
        if self.plain is not None:
            wanted = {name: p.grad for name, p in self.plain.named_parameters()}
        largest = max((_largest(g) for g in wanted.values() if g is not None), default=0.0)
        worst, where = 0.0, ""
        for name, parameter in self.parallel.named_parameters():
            got = parameter.grad
            whole = got.full_tensor() if isinstance(got, DTensor) else got
            if self.plain is None:
                continue
            error = _gradient_error(whole, wanted.get(name), FLOOR * largest)
            if not error <= worst or not where:
                worst, where = error, name
        return on_rank_0(lambda: (worst, where), self.mesh.world_group)


def _failed_alone(error: Exception) -> Exception:
    if isinstance(error, IthacaError):
        return error
    return RuntimeError(f"one process alone: {type(error).__name__}: {error}")


def _gradient_error(got: Tensor | None, want: Tensor | None, floor: float) -> float:
    """Relative to the gradient's largest entry; one that is missing on one side counts as a zero."""
    if got is None and want is None:
        return 0.0
    if got is None or want is None:
        apart = _largest(got if want is None else want)  # type: ignore[arg-type]
    else:
        apart = _largest(got.to(want.device) - want)
    scale = max(0.0 if want is None else _largest(want), floor, 1e-300)
    return _finite(apart / scale)


def _largest(gradient: Tensor) -> float:
    """The largest entry, in one pass."""
    return float(torch.linalg.vector_norm(gradient.detach(), float("inf")))


def _finite(error: float) -> float:
    """NaN compares as neither large nor small: it counts as infinitely wrong."""
    return error if error == error else float("inf")
