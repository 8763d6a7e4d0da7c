"""`causal_loss`: a whole batch in, the global token mean out.

Every rank sums the loss of its own targets; the one division, by the number of targets over micro-batches, ranks
and shards, is here. The value shown is reduced outside autograd, so it is the same on all ranks, while each rank's
gradient is its own part: FSDP2 sums the parts (`weights="shard"` and `"replicate"`); where the caller's own wrapper
averages over ranks (`weights="none"` under DDP, FSDP or DeepSpeed) the parts are scaled by the world size first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.errors import BatchError, PeerError
from ithaca.memory.loss import token_loss
from ithaca.mesh import Mesh
from ithaca.models.binding import Binding, binding_of
from ithaca.models.experts import auxiliary_loss, wants_auxiliary_loss
from ithaca.models.head import TARGETS
from ithaca.sequence.batch import Shard, count_targets, shard_batch
from ithaca.state.weights import averages_gradients
from ithaca.training.agree import agree


def causal_loss(model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, *, count: int | None = None) -> Tensor:
    """The mean loss of a whole batch's targets over all ranks; call `.backward()` on it.

    Every rank of a sequence group passes the same whole batch, ranks of different `mesh.dp_rank` different ones.
    `count`, from `count_tokens`, is the number of targets over several micro-batches: their losses then add up to
    the mean over all. Without labels every token after a document's first is learned.
    """
    binding = binding_of(model)
    if count is not None and count < 0:
        raise BatchError(f"count={count}: pass what ithaca.count_tokens(batches, mesh) gives")
    shard, error = _try_shard(batch, mesh, binding.model.config.get_text_config().vocab_size)
    own = agree(mesh, batch, shard, error).count
    assert shard is not None
    divisor = max(own if count is None else count, 1)
    total, router_logits = _run(model, binding, shard)
    part = total / divisor
    if wants_auxiliary_loss(binding.model, shard.inputs.get("output_router_logits")):
        # Over micro-batches the auxiliary losses are weighted by their tokens, like everything else.
        part = part + auxiliary_loss(binding.model, router_logits, shard.real, mesh) * (own / divisor)
    scale = mesh.world if averages_gradients(model) else 1
    shown: Tensor = _Shown.apply(part, mesh.world_group, scale)
    return shown


def _run(model: nn.Module, binding: Binding, shard: Shard) -> tuple[Tensor, Sequence[Tensor]]:
    """The summed loss of this rank's targets, and its router logits."""
    if binding.memory is None:
        outputs = model(**shard.inputs)
        return token_loss(outputs.logits, shard.targets)[0], getattr(outputs, "router_logits", None) or ()
    # The layers hand their router logits on themselves: what transformers records of a replayed layer has no graph.
    inputs = {key: value for key, value in shard.inputs.items() if key != "output_router_logits"}
    if binding.memory.tiles_head:
        return model(**inputs, **{TARGETS: shard.targets})[0], binding.router_logits
    return token_loss(model(**inputs).logits, shard.targets)[0], binding.router_logits


def count_tokens(batches: Iterable[Mapping[str, Any]], mesh: Mesh) -> int:
    """How many targets the micro-batches of all ranks have together; all ranks raise if one cannot count its own."""
    own, error = 0, None
    try:
        own = sum(count_targets(batch) for batch in batches)
    except Exception as caught:
        error = caught
    # A sequence group has one batch: its first rank counts it.
    counts = [own if mesh.sequence_rank == 0 else 0, int(error is not None)]
    told = torch.tensor(counts, dtype=torch.int64, device=mesh.device)
    dist.all_reduce(told, group=mesh.world_group)
    if error is not None:
        raise error
    if told[1]:
        raise PeerError("another rank could not count its batches and says why; all ranks stop alike")
    return int(told[0])


def _try_shard(batch: Mapping[str, Any], mesh: Mesh, vocab_size: int) -> tuple[Shard | None, Exception | None]:
    try:
        return shard_batch(batch, mesh, vocab_size=vocab_size), None
    except Exception as error:
        # Whatever it is, it is held until all ranks have heard of it: see agree.
        return None, error


class _Shown(torch.autograd.Function):
    """Forward: the sum over all ranks. Backward: each rank's own part, times `scale`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, scale: int) -> Tensor:
        ctx.scale = scale
        total = part.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.scale, None, None
