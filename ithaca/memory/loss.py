"""Token losses as `(sum, count)`: the one division, by the global count, happens in `training/step.py`.

`token_loss` takes logits. `head_loss` takes hidden states and the head's weight, and never has more than one tile of
logits: each tile's loss and its gradients, of the hidden states and of the weight, are computed in forward, which
saves a second product with the head; backward scales both by whatever gradient arrives, so any later scaling of the
loss is right. A shard on which nothing is learned gives a sum of zero that still has a graph, so its backward runs the
same collectives as every other rank's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORE = -100


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Logits become `softcap * tanh(scale * logits / softcap)`; `z` weighs the squared log of the softmax's divisor."""

    scale: float = 1.0
    softcap: float | None = None
    smoothing: float = 0.0
    z: float = 0.0


def token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the targets that are not -100, in fp32 (fp64 stays fp64), and their number."""
    return _sum(logits_BLV.flatten(0, 1), targets_BL.flatten(), LossSpec()), (targets_BL != IGNORE).sum()


def head_loss(
    hidden_BLC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_BL: Tensor, tile: int, spec: LossSpec
) -> tuple[Tensor, Tensor]:
    """The same from hidden states, `tile` tokens of logits at a time."""
    total: Tensor = _HeadLoss.apply(hidden_BLC.flatten(0, 1), weight_VC, bias_V, targets_BL.flatten(), tile, spec)
    return total, (targets_BL != IGNORE).sum()


def _sum(logits_TV: Tensor, targets_T: Tensor, spec: LossSpec) -> Tensor:
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    if spec.scale != 1.0:
        logits_TV = logits_TV * spec.scale
    if spec.softcap is not None:
        logits_TV = spec.softcap * torch.tanh(logits_TV / spec.softcap)
    total = F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE, reduction="sum", label_smoothing=spec.smoothing)
    if spec.z:
        total = total + spec.z * (logits_TV.logsumexp(-1).square() * (targets_T != IGNORE)).sum()
    return total


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
    ) -> Tensor:
        exact = torch.promote_types(hidden_TC.dtype, torch.float32)
        total = hidden_TC.new_zeros((), dtype=exact)
        wants = ctx.needs_input_grad[:3]
        grads = _Gradients(hidden_TC, weight_VC, bias_V, wants)
        for start in range(0, len(hidden_TC), tile):
            span = slice(start, start + tile)
            with torch.set_grad_enabled(any(wants)):
                logits_tV = F.linear(hidden_TC[span], weight_VC, bias_V).detach().requires_grad_(any(wants))
                part = _sum(logits_tV, targets_T[span], spec)
            total += part.detach()
            if any(wants):
                (dlogits_tV,) = torch.autograd.grad(part, logits_tV)
                grads.add(span, dlogits_tV)
        ctx.grads = grads
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.grads.scaled(dtotal), None, None, None)


class _Gradients:
    """Gradients of a loss of weight one, gathered tile by tile; the weight's in fp32."""

    def __init__(self, hidden_TC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, wants: tuple[bool, ...]) -> None:
        self.hidden_TC, self.weight_VC = hidden_TC, weight_VC
        exact = torch.promote_types(weight_VC.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden_TC) if wants[0] else None
        self.weight = torch.zeros_like(weight_VC, dtype=exact) if wants[1] else None
        self.bias = torch.zeros_like(bias_V, dtype=exact) if wants[2] and bias_V is not None else None

    def add(self, span: slice, dlogits_tV: Tensor) -> None:
        if self.hidden is not None:
            torch.matmul(dlogits_tV, self.weight_VC, out=self.hidden[span])
        if self.weight is not None:
            # Out of the matrix units in fp32 would be slower; one rounding a tile, summed in fp32, is what is paid.
            self.weight += dlogits_tV.t() @ self.hidden_TC[span]
        if self.bias is not None:
            self.bias += dlogits_tV.sum(0)

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.hidden is None and self.weight is None and self.bias is None:
            return None, None, None
        hidden = None if self.hidden is None else self.hidden * factor.to(self.hidden.dtype)
        weight = None if self.weight is None else (self.weight.mul_(factor)).to(self.weight_VC.dtype)
        bias = None if self.bias is None else (self.bias * factor).to(self.weight_VC.dtype)
        self.hidden = self.weight = self.bias = None
        return hidden, weight, bias
