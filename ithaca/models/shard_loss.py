"""The loss of a shard: the sum over this rank's targets, and how ranks show one number for their parts.

A rank's gradient is that of its own part, because FSDP2 sums the parts; the value shown is reduced outside autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.memory.head_loss import Each, token_loss
from ithaca.models.bound import Binding
from ithaca.models.handed_out import reduced
from ithaca.models.layers.head import EACH, SMOOTHING, TARGETS, Z
from ithaca.sequence.batch import Shard


def summed_loss(
    model: nn.Module,
    binding: Binding,
    shard: Shard,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    each: Each | None = None,
) -> tuple[Tensor, Sequence[Tensor]]:
    """The summed loss of this rank's targets, and its router logits; `each` is shown every token's own loss."""
    output = model(**loss_inputs(binding, shard, smoothing=smoothing, z=z, each=each))
    return read_loss(binding, shard, output, smoothing=smoothing, z=z, each=each)


def loss_inputs(
    binding: Binding, shard: Shard, *, smoothing: float = 0.0, z: float = 0.0, each: Each | None = None
) -> dict[str, Any]:
    """What the model is called with so that `read_loss` finds a loss in its output."""
    if binding.memory is None:
        return shard.inputs
    # The layers hand their router logits on themselves: what transformers records of a replayed layer has no graph.
    inputs = {key: value for key, value in shard.inputs.items() if key != "output_router_logits"}
    if not binding.memory.tiles_head:
        return inputs
    return inputs | {TARGETS: shard.targets, SMOOTHING: smoothing, Z: z, EACH: each}


def read_loss(
    binding: Binding,
    shard: Shard,
    output: Any,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    each: Each | None = None,
) -> tuple[Tensor, Sequence[Tensor]]:
    """The summed loss and the router logits of a call with `loss_inputs`, or of one that gave logits."""
    logits = None if isinstance(output, tuple) else output.logits
    total = output[0] if logits is None else token_loss(logits, shard.targets, smoothing=smoothing, z=z, each=each)[0]
    if binding.memory is None:
        return total, getattr(output, "router_logits", None) or ()
    # Handed on, not kept: a loss that nobody goes back from is freed with its graph.
    taken, binding.router_logits = binding.router_logits, []
    return total, taken


def shown_sum(part: Tensor, group: dist.ProcessGroup, binding: Binding, scale: float = 1.0) -> Tensor:
    """The sum of all ranks' parts, rounded once; its gradient is this rank's own part, times `scale`.

    Of sums: the mean is taken of what was rounded, as the plain model takes it, so that the two round alike.
    """
    dtype = torch.promote_types(binding.model.dtype, torch.float32)
    total = part.detach().clone()
    dist.all_reduce(total, group=group)
    return reduced(part, total.to(dtype), scale)
