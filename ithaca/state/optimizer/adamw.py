"""AdamW's step on a GPU that clips for nothing: torch's fused one, told to divide gradients, also writes them back.

One kernel reads gradient, weight and moments and writes the last three, whatever the factor; torch's takes a sixth
longer with one. Import this only where triton is.

Invariant: the update is torch's, from the same groups and state, so a run can go on with either; where `taken` is false
nothing changes, the count of steps neither. (1 - beta is taken in fp64, as torch's plain AdamW does; its fused one takes
it in fp32, and its second moments are off by 1e-5 for it.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed.tensor import DTensor

_BLOCK, _WARPS = 2048, 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["place", "places"])
def _update(  # type: ignore[no-untyped-def]
    weights, grads, firsts, seconds, corrections, scale, taken, place, places, count, rate, decay, new1, keep2, new2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(taken) == 0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    grad = tl.load(grads + at, mask=inside).to(tl.float32) / tl.load(scale)
    weight = tl.load(weights + at, mask=inside).to(tl.float32)
    first = tl.load(firsts + at, mask=inside).to(tl.float32)
    second = tl.load(seconds + at, mask=inside).to(tl.float32)
    weight -= decay * weight
    first += new1 * (grad - first)
    second = keep2 * second + new2 * grad * grad
    size = rate / tl.load(corrections + place)
    weight -= size * first / (tl.sqrt(second) / tl.load(corrections + places + place) + eps)
    tl.store(weights + at, weight, mask=inside)
    tl.store(firsts + at, first, mask=inside)
    tl.store(seconds + at, second, mask=inside)


def steps_here(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is torch's plain AdamW over tensors that lie as they are counted."""
    if type(optimizer) is not torch.optim.AdamW:
        return False
    plain = not any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups)
    tensors = (
        _local(t) for g in optimizer.param_groups for p in g["params"] if p.grad is not None for t in (p, p.grad)
    )
    return plain and all(t.is_cuda and t.dtype in _DTYPES and t.is_contiguous() for t in tensors)


@torch.no_grad()
def step(optimizer: Any, taken: Tensor, scale: Tensor) -> None:
    """A step of gradients divided by `scale`, where `taken` is not zero; both fp32, on the device, where they stay."""
    for group in optimizer.param_groups:
        weights, grads, firsts, seconds, counts = (list[Tensor]() for _ in range(5))
        optimizer._init_group(group, weights, grads, firsts, seconds, [], counts)
        if not weights:
            continue
        (beta1, beta2), rate = group["betas"], float(group["lr"])
        # As many as there are: one tensor for all would be read on the host, which waits.
        torch._foreach_add_(counts, [taken] * len(counts))
        # In fp64, as torch has it: of a beta near one little is left in fp32.
        steps = torch.stack(counts).double()
        corrections = torch.stack([1 - beta1**steps, (1 - beta2**steps).sqrt()]).float()
        for place, tensors in enumerate(zip(weights, grads, firsts, seconds, strict=True)):
            count = _local(tensors[0]).numel()
            if count:
                _update[(triton.cdiv(count, _BLOCK),)](
                    *map(_local, tensors), corrections, scale, taken, place, len(weights), count,
                    rate, rate * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, group["eps"],
                    BLOCK=_BLOCK, num_warps=_WARPS,
                )  # fmt: skip


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
