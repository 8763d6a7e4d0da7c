"""Gradient norm, gradient clipping and skipped steps, without waiting for the device.

    norm = gradient_norm(parameters, device)         # a tensor: local shards, then one sum over ranks
    clipped_step(optimizer, norm, loss, clip=1.0)    # skipped on the device if loss or norm is not finite

torch's fused AdamW takes the clipping factor and the flag to skip as tensors, in the attributes that
`torch.amp.GradScaler` sets (`grad_scale`, `found_inf`). The host reads them afterwards. With other optimizers the host waits.

Invariant: a skipped step changes neither weights nor moments nor their step counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# The epsilon of torch.nn.utils.clip_grad_norm_, against division by zero.
_EPS = 1e-6
# On the CPU: numbers that are summed in fp32, and numbers that are cast at once.
_BLOCK, _PIECE = 512, 2**22


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor], device: torch.device) -> Tensor | None:
    """Return the norm of all ranks' gradients, on `device`, in fp32 or, of a CPU's, fp64; None without a gradient."""
    shards: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            shards[grad.device_mesh, grad.placements].append(grad._local_tensor)
        elif grad is not None:
            shards[None].append(grad)
    if not shards:
        return None
    squares = [_summed(key, _square(grads).to(device)) for key, grads in shards.items()]
    return torch.stack(squares).sum().sqrt()


def _square(grads: list[Tensor]) -> Tensor:
    if grads[0].device.type == "cpu":
        return torch.stack([_square_on_cpu(grad) for grad in grads]).sum()
    # torch.nn.utils.get_total_norm sums a bf16 gradient in bf16, to two digits. _foreach_norm is private but is what
    # torch's own function calls (torch 2.11 to 2.13).
    norms = torch._foreach_norm(grads, 2, torch.promote_types(grads[0].dtype, torch.float32))
    return torch.stack(list(norms)).square().sum()


def _square_on_cpu(grad: Tensor) -> Tensor:
    """Return the sum of squares in fp64 of blocks summed in fp32: seven digits, as fast as memory is read.

    A CPU's fp32 sum of millions of numbers has three digits, and its fp64 norm takes far longer than the step.
    """
    total = torch.zeros((), dtype=torch.float64)
    for piece in grad.reshape(-1).split(_PIECE):
        wide = piece.to(torch.promote_types(piece.dtype, torch.float32))
        even = len(wide) // _BLOCK * _BLOCK
        rows = torch.linalg.vector_norm(wide[:even].view(-1, _BLOCK), dim=1)
        total += rows.double().square().sum() + torch.linalg.vector_norm(wide[even:]).double().square()
    return total


def _summed(key: Any, square: Tensor) -> Tensor:
    """Return the sum over the ranks that hold other shards; copies of a shard are not counted again."""
    if key is not None:
        mesh, placements = key
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                dist.all_reduce(square, group=mesh.get_group(dim))
    return square


def clipped_step(optimizer: torch.optim.Optimizer, norm: Tensor | None, loss: Tensor, clip: float) -> None:
    """Step with gradients clipped to norm `clip` (0: unclipped); skip the step if loss or norm is not finite.

    `norm` is None where parameters were stepped inside backward: the call then ends that step.
    """
    if norm is None:
        optimizer.step()
        return
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    factor = ((norm + _EPS) / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
    # Private: the attribute by which torch.amp.GradScaler finds fused optimizers (torch 2.11 to 2.13).
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        if bool(finite):
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            local = [g._local_tensor if isinstance(g, DTensor) else g for g in grads]
            torch._foreach_div_(local, factor.to(local[0].device))
            optimizer.step()
        return
    # A blocking move: with weights on the host the optimizer would read numbers that have not arrived yet.
    where = optimizer.param_groups[0]["params"][0].device
    scale, clips, finite = factor.float().to(where), (factor > 1).to(where), finite.to(where)
    # A step that divides also writes gradients back, which takes a sixth longer. So two steps are launched, with and
    # without division, and the device skips one.
    _step_where(optimizer, finite & ~clips)
    if clip:
        _step_where(optimizer, finite & clips, scale)


def _step_where(optimizer: Any, taken: Tensor, scale: Tensor | None = None) -> None:
    """Take a step with gradients divided by `scale`; if `taken` is false the step changes nothing."""
    optimizer.grad_scale, optimizer.found_inf = scale, (~taken).float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
