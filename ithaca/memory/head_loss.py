"""Fused linear cross-entropy in tiles: token losses as `(sum, count)`, divided once in `loss/causal.py`.

`token_loss` takes logits. `head_loss` takes hidden states and the head's weight, and never has more than one tile of
logits in memory:

    for each tile of tokens:   logits = hidden @ weight.T -> loss, dlogits -> dhidden[tile], dweight += (fp32)
    backward:                  dhidden and dweight times the loss's gradient

The gradients are computed in forward, which saves a second product with the head. A compiled tile uses Liger's kernel
where that is installed. A shard without targets returns a sum of zero that still has a graph, so its backward runs the
same collectives as on every other rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ithaca.constants import IGNORE_INDEX
from ithaca.errors import UnsupportedError
from ithaca.memory import liger


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Loss options: logits become `softcap * tanh(scale * logits / softcap)`; `z` is the weight of the z-loss (lse^2)."""

    scale: float = 1.0
    softcap: float | None = None
    smoothing: float = 0.0
    z: float = 0.0


Each = Callable[[Tensor], None]


def token_loss(
    logits_BLV: Tensor, targets_BL: Tensor, *, smoothing: float = 0.0, z: float = 0.0, each: Each | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the targets that are not -100, of fp32 logits at least, and their number.

    `each` is called with every token's own loss, [B, L], zero where the target is -100.
    """
    logits_TV = logits_BLV.flatten(0, 1).to(torch.promote_types(logits_BLV.dtype, torch.float32))
    targets_T = targets_BL.flatten()
    total = F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing)
    if z:
        total = total + z * (logits_TV.logsumexp(-1).square() * (targets_T != IGNORE_INDEX)).sum()
    if each is not None:
        with torch.no_grad():
            each(F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE_INDEX, reduction="none").view_as(targets_BL))
    return total.double(), (targets_BL != IGNORE_INDEX).sum()


def head_loss(
    hidden_BLC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    targets_BL: Tensor,
    tile: int,
    spec: LossSpec,
    *,
    fuse: bool = False,
    each: Each | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `token_loss` of the head's logits, `tile` tokens of them at a time; `fuse` compiles a tile's work."""
    if targets_BL.numel() <= tile and not fuse:
        # A single tile saves no memory; torch's own operations round as the plain model does.
        logits_BLV = _shaped(F.linear(hidden_BLC, weight_VC, bias_V), spec)
        return token_loss(logits_BLV, targets_BL, smoothing=spec.smoothing, z=spec.z, each=each)
    losses_BL = None if each is None else torch.empty_like(targets_BL, dtype=torch.float32)
    total: Tensor = _HeadLoss.apply(
        hidden_BLC.flatten(0, 1), weight_VC, bias_V, targets_BL.flatten(), tile, spec, fuse, losses_BL
    )
    if each is not None and losses_BL is not None:
        each(losses_BL)
    return total, (targets_BL != IGNORE_INDEX).sum()


def _shaped(logits: Tensor, spec: LossSpec) -> Tensor:
    """Return the logits scaled and capped, in fp32 at least."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32)) * spec.scale
    return values if spec.softcap is None else spec.softcap * torch.tanh(values / spec.softcap)


def loss_and_gradient(logits_TV: Tensor, targets_T: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """Return each token's loss, in fp32 at least, and the gradient of the losses' sum in the logits' dtype."""
    values_TV = _shaped(logits_TV, spec)
    valid_T = targets_T != IGNORE_INDEX
    index_T1 = targets_T.clamp(min=0)[:, None]
    lse_T = values_TV.logsumexp(-1)
    right = 1 - spec.smoothing
    loss_T = lse_T - right * values_TV.gather(1, index_T1)[:, 0] + spec.z * lse_T.square()
    if spec.smoothing:
        loss_T = loss_T - spec.smoothing * values_TV.mean(-1)
    weight_T1 = ((1 + 2 * spec.z * lse_T) * valid_T)[:, None]
    # A comparison rather than a scatter: the compiler fuses it into one pass.
    is_target_TV = torch.arange(values_TV.shape[1], device=index_T1.device) == index_T1
    target_TV = is_target_TV.to(values_TV.dtype) * right + spec.smoothing / values_TV.shape[1]
    grad_TV = weight_T1 * (values_TV - lse_T[:, None]).exp() - valid_T[:, None] * target_TV
    if spec.softcap is not None:
        grad_TV = grad_TV * (1 - (values_TV / spec.softcap).square())
    return loss_T * valid_T, (grad_TV * spec.scale).to(logits_TV.dtype)


@cache
def _compiled(spec: LossSpec) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(partial(loss_and_gradient, spec=spec))


def in_place_kernel(device: torch.device, spec: LossSpec) -> Any | None:
    """Return Liger's kernel, which turns logits into their gradient in place; None where it cannot run."""
    if device.type != "cuda" or torch.version.hip is not None or spec.scale != 1:
        return None
    return liger.tile_kernel()


def _tile_loss(logits_TV: Tensor, targets_T: Tensor, spec: LossSpec, *, fuse: bool) -> tuple[Tensor, Tensor]:
    if not fuse:
        return loss_and_gradient(logits_TV, targets_T, spec)
    kernel = in_place_kernel(logits_TV.device, spec)
    if kernel is not None:
        loss_T = liger.in_place(
            kernel, logits_TV, targets_T, softcap=spec.softcap, smoothing=spec.smoothing, z=spec.z, ignore=IGNORE_INDEX
        )
        return loss_T, logits_TV
    # Dynamic in the number of tokens, or the last, shorter tile would compile again. maybe_mark_dynamic is private
    # (torch 2.11 to 2.13): the public mark_dynamic raises where a size is specialized after all.
    torch._dynamo.maybe_mark_dynamic(logits_TV, 0)
    torch._dynamo.maybe_mark_dynamic(targets_T, 0)
    return _compiled(spec)(logits_TV, targets_T)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        tile: int,
        spec: LossSpec,
        fuse: bool,
        losses_BL: Tensor | None,
    ) -> Tensor:
        # fp64: an fp32 sum over a million tokens of loss 10 moves in steps of one.
        total = hidden_TC.new_zeros((), dtype=torch.float64)
        grads = _Gradients(hidden_TC, weight_VC, bias_V, ctx.needs_input_grad[:3])
        for start in range(0, len(hidden_TC), tile):
            span = slice(start, start + tile)
            logits_tV = F.linear(hidden_TC[span], weight_VC, bias_V)
            loss_t, dlogits_tV = _tile_loss(logits_tV, targets_T[span], spec, fuse=fuse)
            del logits_tV
            total += loss_t.sum(dtype=torch.float64)
            if losses_BL is not None:
                losses_BL.view(-1)[span] = loss_t
            grads.add(span, hidden_TC[span], dlogits_tV)
            # Freed before the next tile's logits are allocated.
            del dlogits_tV
        ctx.grads = grads
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.grads.scaled(dtotal), None, None, None, None, None)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, without rounding the product first where the GPU's matrix units add to fp32."""
    if left.is_cuda and torch.version.hip is None and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


class _Gradients:
    """Gradients of the unscaled loss, summed tile by tile; the weight's in fp32.

    The object lives until the loss's backward, so it keeps no reference to the hidden states.
    """

    def __init__(
        self, hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, needs_grad: tuple[bool, ...]
    ) -> None:
        self.weight_VC = weight_VC
        exact = torch.promote_types(weight_VC.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden_TC) if needs_grad[0] else None
        self.weight = torch.zeros_like(weight_VC, dtype=exact) if needs_grad[1] else None
        self.bias = torch.zeros_like(bias_V, dtype=exact) if needs_grad[2] and bias_V is not None else None
        self.freed = False

    def add(self, span: slice, hidden_tC: Tensor, dlogits_tV: Tensor) -> None:
        if self.hidden is not None:
            torch.matmul(dlogits_tV, self.weight_VC, out=self.hidden[span])
        if self.weight is not None:
            _add_product(self.weight, dlogits_tV.t(), hidden_tC)
        if self.bias is not None:
            self.bias += dlogits_tV.sum(0)

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.freed:
            raise UnsupportedError(
                "backward ran a second time through a loss that had let go of its gradients: retain_graph=True needs "
                "parallelize(..., memory=None)"
            )
        hidden = None if self.hidden is None else self.hidden * factor.to(self.hidden.dtype)
        weight = None if self.weight is None else (self.weight.mul_(factor)).to(self.weight_VC.dtype)
        bias = None if self.bias is None else (self.bias * factor).to(self.weight_VC.dtype)
        self.hidden, self.weight, self.bias, self.freed = None, None, None, True
        return hidden, weight, bias
