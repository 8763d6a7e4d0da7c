"""`reduce_mean`: the mean of a user's own loss over all ranks, from each rank's sum and count.

A rank has the logits (and, in a hook, the hidden states) of its own tokens. Any loss that is a sum over tokens divided
by their number is exact in three lines:

    shard = ithaca.shard_batch(batch, mesh)
    values = my_loss(model(**shard.inputs).logits, shard.targets)                     # [B, L], one number a token
    loss = ithaca.reduce_mean(model, (values * shard.real).sum(), shard.real.sum(), mesh)

The value is equal on all ranks. The gradient is exact under the gradient reduction that `parallelize` chose, so the
result may be added to `causal_loss` or call `backward` alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.arguments import named_arguments, shown
from ithaca.errors import BatchError, PeerError
from ithaca.mesh import Mesh
from ithaca.models.binding_state import binding_of, check_same_mesh
from ithaca.models.reduction_marks import with_local_gradient
from ithaca.quantities import finite_or_nan


@named_arguments
def reduce_mean(
    model: nn.Module, total: Tensor, count: Tensor | float, mesh: Mesh, *, total_count: float | None = None
) -> Tensor:
    """Return the mean over all ranks of values, of which this rank has summed `count` into `total`.

    Every rank calls this function; a rank without values passes a sum over no values and `count` 0. Over several
    micro-batches whose means are to add up, pass the count of all of them as `count`, or the count of all ranks, from
    `ithaca.count_tokens`, as `total_count` (`total_count=1` makes the mean a sum). Without gradients the mean is a
    metric.
    """
    binding = binding_of(model)
    check_same_mesh(binding.mesh, mesh)
    error = _find_error(total, count, total_count)
    value, number = _all_reduce(total, count, mesh, error)
    if total_count is not None:
        number = torch.full_like(number, float(total_count))
    # With a count of 0 on all ranks the result is 0, not 0/0.
    divisor = torch.where(number > 0, number, torch.ones_like(number))
    mean = (value / divisor).to(torch.promote_types(total.dtype, torch.float32))
    # A wrapper such as DDP, and FSDP2 over whole sequences, average gradients over ranks: the factor undoes that.
    scale = mesh.world if binding.averages or not binding.sharded else 1
    return with_local_gradient(total, mean, scale / divisor)


def _find_error(total: object, count: object, total_count: object) -> Exception | None:
    """Return the error of a bad total or count, which is raised only after all ranks know of it."""
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


def _all_reduce(total: Tensor, count: Tensor | float, mesh: Mesh, error: Exception | None) -> tuple[Tensor, Tensor]:
    """Return total and count over all ranks, in fp64; all ranks raise if one passed no number."""
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
