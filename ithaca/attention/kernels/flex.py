"""torch's flex attention, compiled: windows and softcap on a GPU.

`q_BShD, k_BSkD, v_BSkE -> out_BShE, lse_BhS`. The first call of a shape compiles, which takes seconds.
Block masks are computed from block indices, never from an [S, S] mask, and cached for the last few lengths.

Backward runs forward once more, because torch cannot start the compiled backward from a saved `(out, lse)`. Its
gradients are nevertheless those of the given `(out, lse)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ithaca.attention.kernels.interface import HALF_DTYPES, QKV, AttentionSpec, Gradients, Kernel, cuda_refusal

# Longer rows use larger blocks: the four tables of a mask hold (S / block)^2 entries each.
SMALL_BLOCK, LARGE_BLOCK, LONG_ROW = 128, 1024, 131_072
# Limit of recompilations: flex is compiled once for each mask, cap and head count, and torch's default of 8 is too few.
COMPILED_FORMS = 64

Mod = Callable[..., Tensor]


class FlexKernel(Kernel):
    """Windows and softcap, head sizes from 16 to 256, fp16, bf16 or fp32."""

    name = "flex"

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        sizes = (q_BShD.shape[-1], v_BSkE.shape[-1])
        if min(sizes) < 16 or max(sizes) > 256:
            return f"head sizes go from 16 to 256, got {sizes[0]} and {sizes[1]}"
        return cuda_refusal(q_BShD, (*HALF_DTYPES, torch.float32))

    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        self.check(qkv)
        out_BhSE, lse_BhS, _ = _run(qkv, spec)
        return out_BhSE.detach().transpose(1, 2), lse_BhS.detach()

    def backward(
        self, dout_BShE: Tensor, qkv: QKV, out_BShE: Tensor, lse_BhS: Tensor, spec: AttentionSpec
    ) -> Gradients:
        dout, out = dout_BShE.transpose(1, 2), out_BShE.transpose(1, 2)
        out0, lse0, leaves = _run(qkv, spec)
        # Wanted, with P = exp(S - lse) at the given (out, lse): dv = P^T dout, dS = P (dP - dout.out).
        # Autograd gives, at its own (out0, lse0) for inputs (g, w): dv = P0^T g, dS = P0 (g v^T - g.out0 + w).
        # P = P0 s with s = exp(lse0 - lse). So g = s dout makes dv right and turns g v^T into s dP, and
        # w = g.out0 - s dout.out does the rest. Without sinks s = 1 and out0 = out: then g = dout, w = 0.
        s = torch.exp(lse0.detach() - lse_BhS)
        g = (dout * s.unsqueeze(-1)).to(dout.dtype)
        w = _rowsum(g, out0.detach()) - s * _rowsum(dout, out)
        grads = torch.autograd.grad([out0, lse0], leaves, [g, w])
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


def _rowsum(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() * y.float()).sum(-1)


def _run(qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return out [B, h, S, E] and lse with their graph, and the graph's leaves.

    Forward builds a graph too, so that one form is compiled for forward and backward.
    """
    q, k, v = (x.detach().requires_grad_() for x in qkv.by_head())
    with torch.enable_grad():
        out_BhSE, lse_BhS = _attention(q, k, v, spec)
    return out_BhSE, lse_BhS, (q, k, v)


def _attention(q_BhSD: Tensor, k_BkSD: Tensor, v_BkSE: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    mask = _block_mask(q_BhSD.shape[2], spec.causal, spec.window, q_BhSD.device)
    # Caps stay constants of the kernel; lengths may become symbolic, so that a new length does not compile.
    # torch._dynamo.config.patch is private; checked with torch 2.11 to 2.13.
    with torch._dynamo.config.patch(recompile_limit=COMPILED_FORMS, specialize_float=True):
        out_BhSE, aux = _compiled()(
            q_BhSD,
            k_BkSD,
            v_BkSE,
            score_mod=None if spec.softcap is None else _softcap_mod(spec.softcap),
            block_mask=mask,
            scale=spec.scale,
            enable_gqa=q_BhSD.shape[1] != k_BkSD.shape[1],
            # Not the decoding kernel, which torch takes for short rows: one kernel to verify is enough.
            kernel_options={"BACKEND": "TRITON"},
            return_aux=AuxRequest(lse=True),
        )
    return out_BhSE, aux.lse


@cache
def _compiled() -> Callable[..., Any]:
    """Return the compiled function. `fullgraph`: a graph break would run flex eagerly, with [S, S] scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


@cache
def _softcap_mod(softcap: float) -> Mod:
    def cap(score: Tensor, b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _mask_mod(causal: bool, window: int | None) -> Mod:
    if window is None:
        return _causal
    return _near_causal_mod(window) if causal else _near_mod(window)


def _causal(b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
    return n >= m


def _near_causal_mod(window: int) -> Mod:
    def near_causal(b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return (n >= m) & (n - m < window)

    return near_causal


def _near_mod(window: int) -> Mod:
    def near(b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return (n - m < window) & (m - n < window)

    return near


@lru_cache(maxsize=8)
def _block_mask(length: int, causal: bool, window: int | None, device: torch.device) -> Any:
    """Return the mask of a row of `length` tokens; None if every query sees every key."""
    from torch.nn.attention.flex_attention import BlockMask

    if not causal and (window is None or window >= length):
        return None
    block = SMALL_BLOCK if length <= LONG_ROW else LARGE_BLOCK
    partial, full = _block_kinds(length, block, causal, window, device)
    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=block,
        mask_mod=_mask_mod(causal, window),
        seq_lengths=(length, length),
    )


def _block_kinds(
    length: int, block: int, causal: bool, window: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the [query block, key block] pairs that the mask keeps in part, and those in full; bool, [N, N]."""
    starts = torch.arange(0, length, block, device=device)
    # Distances n - m over a pair of blocks go from `lead - (block - 1)` to `lead + (block - 1)`.
    lead = starts[:, None] - starts[None, :]
    least, most = lead - (block - 1), lead + (block - 1)
    reach = length if window is None else window - 1
    lowest = 0 if causal else -reach
    seen = (most >= lowest) & (least <= reach)
    whole = starts + block <= length
    full = seen & (least >= lowest) & (most <= reach) & whole[:, None] & whole[None, :]
    return seen & ~full, full


def _ordered(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return each query block's number of key blocks and their indices, from pairs [N, N]; kept ones come first."""
    counts = pairs.sum(-1, dtype=torch.int32)
    order = pairs.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None].contiguous(), order[None, None].contiguous()
