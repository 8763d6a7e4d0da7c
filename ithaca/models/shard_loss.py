"""The loss of a shard: from a model's output to one number that all ranks share.

    output = model(**loss_inputs(binding, shard, asked))
    part   = loss_of(binding, shard, output, asked=asked, weight=targets)     this rank's sum over its own targets
    loss   = shown_sum(part, group, binding) / targets                        one number; each rank's gradient is its part's

`causal_loss`, Trainer's hooks and rehearsal all use these three. A rank's gradient is that of its own part, because FSDP2
sums the parts; the value that is returned is reduced outside autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.memory.head_loss import Each, token_loss
from ithaca.models.binding_state import Binding
from ithaca.models.experts import adds_auxiliary_loss, auxiliary_loss
from ithaca.models.layers.head import EACH, SMOOTHING, TARGETS, Z
from ithaca.models.reduction_marks import with_local_gradient
from ithaca.sequence.batch import Shard


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of one token: cross-entropy with label smoothing and z-loss. `each` is called with every token's own loss."""

    smoothing: float = 0.0
    z: float = 0.0
    each: Each | None = None


CROSS_ENTROPY = TokenLoss()


def loss_inputs(binding: Binding, shard: Shard, asked: TokenLoss = CROSS_ENTROPY) -> dict[str, Any]:
    """Return the arguments of a model's call whose output goes to `loss_of`."""
    if binding.memory is None:
        return shard.inputs
    # The layers return their router logits themselves: what transformers records of a recomputed layer has no graph.
    inputs = {key: value for key, value in shard.inputs.items() if key != "output_router_logits"}
    if not binding.memory.tiles_head:
        return inputs
    return inputs | {TARGETS: shard.targets, SMOOTHING: asked.smoothing, Z: asked.z, EACH: asked.each}


def loss_of(
    binding: Binding,
    shard: Shard,
    output: Any,
    *,
    asked: TokenLoss = CROSS_ENTROPY,
    routers: bool | None = None,
    weight: Tensor | int,
) -> Tensor:
    """Return the sum over this rank's targets, with the router's auxiliary loss if the model has one.

    `output`: of a call with `loss_inputs`, or any output with logits. `routers`: the call's `output_router_logits`, None
    for the config's. `weight`: the number of targets of this batch on all ranks; over micro-batches the auxiliary loss is
    weighted by it, like the loss of the tokens.
    """
    logits = None if isinstance(output, tuple) else output.logits
    if logits is None:
        total = output[0]
    else:
        total = token_loss(logits, shard.targets, smoothing=asked.smoothing, z=asked.z, each=asked.each)[0]
    if binding.memory is None:
        router_logits = getattr(output, "router_logits", None) or ()
    else:
        # Taken off the binding: a loss without backward is freed with its graph.
        router_logits, binding.router_logits = binding.router_logits, []
    if adds_auxiliary_loss(binding.model, routers):
        total = total + auxiliary_loss(binding.model, router_logits, shard.real, binding.mesh) * weight
    return total


def shown_sum(part: Tensor, group: dist.ProcessGroup, binding: Binding, scale: float = 1.0) -> Tensor:
    """Return the sum of all ranks' parts, rounded once; its gradient is this rank's own part, times `scale`.

    The plain model rounds the sum before it divides; so does this function, and both round the same way.
    """
    dtype = torch.promote_types(binding.model.dtype, torch.float32)
    total = part.detach().clone()
    dist.all_reduce(total, group=group)
    return with_local_gradient(part, total.to(dtype), scale)
