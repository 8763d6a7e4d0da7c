"""Dense softmax attention written once, plainly, with autograd: what every kernel is compared with.

`q_BShD, k_BSkD, v_BSkE -> out_BShE, lse_BhS`, in the inputs' own dtype. Builds [B, h, S, S] scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ithaca.attention.kernels.interface import AttentionSpec

Grads = tuple[Tensor, Tensor, Tensor]


def visible(length: int, spec: AttentionSpec) -> Tensor:
    """[S, S] bool: query n sees key m."""
    n, m = torch.arange(length)[:, None], torch.arange(length)[None, :]
    seen = n >= m if spec.causal else torch.ones(length, length, dtype=torch.bool)
    return seen if spec.window is None else seen & ((n - m).abs() < spec.window)


def naive(
    q_BShD: Tensor, k_BSkD: Tensor, v_BSkE: Tensor, spec: AttentionSpec, sinks_h: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention by one softmax; a sink is one more key of that score and of value zero."""
    group = q_BShD.shape[2] // k_BSkD.shape[2]
    k_BShD, v_BShE = (x.repeat_interleave(group, 2) for x in (k_BSkD, v_BSkE))
    scores = torch.einsum("bnhd,bmhd->bhnm", q_BShD, k_BShD) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible(q_BShD.shape[1], spec), -torch.inf)
    lse_BhS = scores.logsumexp(-1)
    if sinks_h is not None:
        lse_BhS = torch.logaddexp(lse_BhS, sinks_h[None, :, None].expand_as(lse_BhS))
    weights = torch.exp(scores - lse_BhS[..., None])
    return torch.einsum("bhnm,bmhe->bnhe", weights, v_BShE), lse_BhS


def naive_grads(
    dout_BShE: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks_h: Tensor | None = None
) -> Grads:
    """Autograd's dq, dk, dv."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out_BShE, _ = naive(inputs[0], inputs[1], inputs[2], spec, sinks_h)
    dq, dk, dv = torch.autograd.grad(out_BShE, inputs, dout_BShE)
    return dq, dk, dv
