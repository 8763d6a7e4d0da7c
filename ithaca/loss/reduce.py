"""`reduce_mean`: a loss of the user's own over what one rank has of a sequence.

A rank has the logits (and, in a hook, the hidden states) of its own tokens. Any loss that is a sum over tokens divided
by their number is exact in three lines:

    shard = ithaca.shard_batch(batch, mesh)
    values = my_loss(model(**shard.inputs).logits, shard.targets)                     # [B, L], one number a token
    loss = ithaca.reduce_mean(model, (values * shard.real).sum(), shard.real.sum(), mesh)

The value is the mean over all ranks, the same on each; the gradient is exact under the reduction of gradients that
`parallelize` chose, so the result may be added to `causal_loss` or go back alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.arguments import named_arguments, shown
from ithaca.errors import BatchError, PeerError
from ithaca.mesh import Mesh
from ithaca.models.bound import Binding, binding_of, check_same_mesh
from ithaca.models.reduction_marks import with_local_gradient
from ithaca.quantities import finite_or_nan


@named_arguments
def reduce_mean(
    model: nn.Module, total: Tensor, count: Tensor | float, mesh: Mesh, *, total_count: float | None = None
) -> Tensor:
    """The mean over all ranks of values of which this rank has summed `count` into `total`.

    Every rank calls it, one with nothing to sum too: its `total` is a sum over no values, its `count` 0. Over several
    micro-batches whose means shall add up, `count` is this rank's number in all of them; or `total_count` is that of all
    ranks together, as `ithaca.count_tokens` gives it (`total_count=1` makes the mean a sum). Without gradients it is a
    mean to look at: a metric over logits.
    """
    binding = binding_of(model)
    check_same_mesh(binding.mesh, mesh)
    error = _wrong(total, count, total_count)
    value, number = _added(total, count, mesh, error)
    if total_count is not None:
        number = torch.full_like(number, float(total_count))
    # Nothing was counted on any rank: the sum over nothing, not 0/0.
    divisor = torch.where(number > 0, number, torch.ones_like(number))
    shown = (value / divisor).to(torch.promote_types(total.dtype, torch.float32))
    return with_local_gradient(total, shown, _scale(binding) / divisor)


def _scale(binding: Binding) -> int:
    """What makes up for a wrapper, or FSDP2 over whole sequences, that averages gradients over ranks."""
    return binding.mesh.world if binding.averages or not binding.sharded else 1


def _wrong(total: object, count: object, total_count: object) -> Exception | None:
    """What is no sum and no number, held until all ranks know of it."""
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
        found = f"{list(total.shape)} of {total.dtype}" if isinstance(total, Tensor) else shown(total)
        return BatchError(
            f"reduce_mean: total is {found}: pass one floating-point number, the sum over this rank's values"
        )
    for name, number in (("count", count), ("total_count", total_count)):
        if number is None and name == "total_count":
            continue
        single = not isinstance(number, Tensor) or (number.numel() == 1 and not number.requires_grad)
        if not single or not 0 <= finite_or_nan(number.item() if isinstance(number, Tensor) else number) < float("inf"):
            return BatchError(
                f"reduce_mean: {name}={shown(number)}: pass one number of values, 0 or more, without a gradient"
            )
    return None


def _added(total: Tensor, count: Tensor | float, mesh: Mesh, error: Exception | None) -> tuple[Tensor, Tensor]:
    """Total and count over all ranks, in fp64; all ranks raise if one passed something else than numbers."""
    mine = torch.zeros(4, dtype=torch.float64, device=mesh.device)
    if error is None:
        mine[0], mine[1] = total.detach().double().reshape(()), float(count)
        mine[2] = float(total.requires_grad)
    else:
        mine[3] = 1.0
    if mesh.world > 1:
        dist.all_reduce(mine, group=mesh.world_group)
    if error is not None:
        raise error
    if mine[3]:
        raise PeerError(
            "another rank passed something else than numbers to reduce_mean and says why; all ranks stop alike"
        )
    with_graph = int(mine[2])
    if with_graph not in (0, mesh.world):
        raise BatchError(
            f"reduce_mean: total needs a gradient on {with_graph} of {mesh.world} ranks, and backward would wait for the "
            "others: compute it from the logits on every rank, as (values * mask).sum() does where nothing is masked in"
        )
    return mine[0], mine[1]
