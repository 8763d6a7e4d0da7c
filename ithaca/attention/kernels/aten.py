"""torch's attention operators with their lse: all calls of private ATen operators stand in this file.

torch's public `scaled_dot_product_attention` neither returns the lse nor starts a backward from a given `(out, lse)`,
and anchors and sinks need both. The argument lists below are those of torch 2.11 to 2.13 and have changed before:
`tests/attention/test_kernels.py` calls the operators on meta tensors and, where a CPU can, compares their results.

    operator    arguments                          layout                 varlen
    cpu         dense, one head size, fp32, fp64   [B, h, S, D]           no
    cudnn       dense, fp16 or bf16                [B, h, S, D]           no
    flash       dense or varlen, fp16 or bf16      [B, S, h, D], [T, h, D]  yes
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ithaca.attention.kernels.interface import Gradients

_ATEN: Any = torch.ops.aten
_NO_DROPOUT = 0.0


def cpu_forward(q_BhSD: Tensor, k_BkSD: Tensor, v_BkSD: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return `(out_BhSD, lse_BhS)`."""
    out_BhSD, lse_BhS = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        q_BhSD, k_BkSD, v_BkSD, _NO_DROPOUT, causal, scale=scale
    )
    return out_BhSD, lse_BhS


def cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BhS: Tensor, *, causal: bool, scale: float
) -> Gradients:
    """Return `(dq, dk, dv)`, all tensors [B, h, S, D]."""
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse_BhS, _NO_DROPOUT, causal, scale=scale
    )
    return dq, dk, dv


def cudnn_forward(
    q_BhSD: Tensor, k_BkSD: Tensor, v_BkSE: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return `(out_BhSE, lse_BhS1)`."""
    bias, with_lse, debug_mask = None, True, False
    results = _ATEN._scaled_dot_product_cudnn_attention(
        q_BhSD, k_BkSD, v_BkSE, bias, with_lse, _NO_DROPOUT, causal, debug_mask, scale=scale
    )
    return results[0], results[1]


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BhS1: Tensor, *, causal: bool, scale: float
) -> Gradients:
    """Return `(dq, dk, dv)`, all tensors [B, h, S, D]; every row is one document of S tokens."""
    length = q.shape[2]
    # Philox seed and offset of the dropout, which is none.
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    bias, first_offsets, last_offsets = None, None, None
    dq, dk, dv = _ATEN._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse_BhS1,
        unused,
        unused,
        bias,
        first_offsets,
        last_offsets,
        length,
        length,
        _NO_DROPOUT,
        causal,
        scale=scale,
    )
    return dq, dk, dv


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    longest: int,
    *,
    causal: bool,
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)`; `offsets` are the documents' bounds, None for dense tensors."""
    debug_mask = False
    results = _ATEN._flash_attention_forward(
        q,
        k,
        v,
        offsets,
        offsets,
        longest,
        longest,
        _NO_DROPOUT,
        causal,
        debug_mask,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return results[0], results[1]


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor | None,
    longest: int,
    *,
    causal: bool,
    scale: float,
    window: tuple[int, int],
) -> Gradients:
    """Return `(dq, dk, dv)`."""
    # State of the dropout's generator, in the dtype that the operator reads; unused without dropout.
    rng_state = torch.zeros(2, dtype=torch.uint64, device=dout.device)
    dq, dk, dv = _ATEN._flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        offsets,
        offsets,
        longest,
        longest,
        _NO_DROPOUT,
        causal,
        rng_state,
        torch.empty(0, device=dout.device),
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return dq, dk, dv
