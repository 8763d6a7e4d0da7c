"""The norm of all gradients, and a step that is clipped by it and left out where something is not finite.

Both stay on the device: the norm is of local shards, summed over the ranks that hold the others, and torch's fused AdamW
takes the factor and the verdict as tensors, by the attributes that `torch.amp.GradScaler` sets (`grad_scale`,
`found_inf`). The host reads them afterwards and never waits before a step. Other optimizers wait.

Invariant: a step left out changes neither weights nor moments nor their count of steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# As torch.nn.utils.clip_grad_norm_ has it: no division by nothing.
_EPS = 1e-6
# Numbers of a CPU's gradient that are summed in fp32, and that are widened at once.
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
    # In bf16 the norm of a bf16 gradient would have two digits.
    norms = torch._foreach_norm(grads, 2, torch.promote_types(grads[0].dtype, torch.float32))
    return torch.stack(list(norms)).square().sum()


def _square_on_cpu(grad: Tensor) -> Tensor:
    """Sum in fp64 over blocks of fp32: a CPU's fp32 sum of millions has three digits, and its fp64 norm takes far longer
    than the step; this has seven, as fast as the gradient is read."""
    total = torch.zeros((), dtype=torch.float64)
    for piece in grad.reshape(-1).split(_PIECE):
        wide = piece.to(torch.promote_types(piece.dtype, torch.float32))
        even = len(wide) // _BLOCK * _BLOCK
        rows = torch.linalg.vector_norm(wide[:even].view(-1, _BLOCK), dim=1)
        total += rows.double().square().sum() + torch.linalg.vector_norm(wide[even:]).double().square()
    return total


def _summed(key: Any, square: Tensor) -> Tensor:
    """Sum over the ranks that hold the other shards; a copy of a shard is not counted again."""
    if key is not None:
        mesh, placements = key
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                dist.all_reduce(square, group=mesh.get_group(dim))
    return square


def clipped_step(optimizer: torch.optim.Optimizer, norm: Tensor | None, loss: Tensor, clip: float) -> None:
    """Step unless loss or norm is not finite, with gradients whose norm is `clip` at most (0: as they are).

    Where the optimizer clips and skips by itself nothing is waited for. `norm` is None where gradients were stepped as
    they came: the call then ends that step.
    """
    if norm is None:
        optimizer.step()
        return
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    factor = _factor(norm, clip) if clip else torch.ones_like(norm)
    if not _scales_itself(optimizer):
        if bool(finite):
            _divide([p for group in optimizer.param_groups for p in group["params"]], factor)
            optimizer.step()
        return
    # Moved here, where that is waited for: the optimizer would read what is still on its way to the host.
    where = optimizer.param_groups[0]["params"][0].device
    scale, clips, finite = factor.float().to(where), (factor > 1).to(where), finite.to(where)
    # A step that divides also writes gradients back, a sixth more of its time: two are launched, and one is left out.
    _step_where(optimizer, finite & ~clips)
    if clip:
        _step_where(optimizer, finite & clips, scale)


def _step_where(optimizer: Any, taken: Tensor, scale: Tensor | None = None) -> None:
    """Take a step of gradients divided by `scale`; where `taken` is false it changes nothing."""
    optimizer.grad_scale, optimizer.found_inf = scale, (~taken).float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _scales_itself(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _factor(norm: Tensor, clip: float) -> Tensor:
    """Return the number that gradients are divided by."""
    return ((norm + _EPS) / clip).clamp(min=1.0)


def _divide(parameters: list[Tensor], factor: Tensor) -> None:
    grads = [p.grad for p in parameters if p.grad is not None]
    local = [g._local_tensor if isinstance(g, DTensor) else g for g in grads]
    torch._foreach_div_(local, factor.to(local[0].device))
