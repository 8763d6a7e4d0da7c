"""Exact attention in plain torch, a block of queries at a time: any device, any dtype, every feature, slow.

`q_BShD, k_BSkD, v_BSkE -> out_BShE, lse_BhS`. The reference for the other kernels, and the fallback on the CPU. No
[S, S] tensor ever exists: a block of queries is multiplied with the keys it can see only, and has as many queries as
keep its scores within a fixed size. Scores are fp32, or fp64 for fp64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ithaca.attention.kernels.interface import QKV, AttentionSpec, Gradients, Kernel

# Largest number of scores in a block: 256 MiB in fp32, of which backward holds about four.
BLOCK_SCORES = 2**26


class BlockwiseKernel(Kernel):
    """Kernel that refuses nothing. Inside, heads are grouped: [B, k, g, n, D] with g query heads to a kv head."""

    name = "blockwise"

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        return None

    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        self.check(qkv)
        q_BShD, k_BSkD, v_BSkE = qkv.tensors
        batch, length, heads, _ = q_BShD.shape
        out_BShE = q_BShD.new_empty(batch, length, heads, v_BSkE.shape[-1])
        lse_BhS = q_BShD.new_empty((batch, heads, length), dtype=_exact(q_BShD.dtype))

        # A function, so that a block's tensors are freed before the next block begins.
        def attend(queries: slice, keys: slice) -> None:
            q, k, v = _grouped(q_BShD, queries, k_BSkD), _headed(k_BSkD, keys), _headed(v_BSkE, keys)
            scores, _ = _scores(q, k, queries, keys, spec)
            lse = scores.logsumexp(-1)
            out_BShE[:, queries] = _flat((scores - lse[..., None]).exp() @ v).to(out_BShE.dtype)
            lse_BhS[:, :, queries] = lse.flatten(1, 2)

        for queries, keys in _blocks(q_BShD, spec):
            attend(queries, keys)
        return out_BShE, lse_BhS

    def backward(
        self, dout_BShE: Tensor, qkv: QKV, out_BShE: Tensor, lse_BhS: Tensor, spec: AttentionSpec
    ) -> Gradients:
        q_BShD, k_BSkD, v_BSkE = qkv.tensors
        exact = _exact(q_BShD.dtype)
        dq_BShD = torch.empty(q_BShD.shape, dtype=q_BShD.dtype, device=q_BShD.device)
        dk_BkSD, dv_BkSE = (
            torch.zeros(x.transpose(1, 2).shape, dtype=exact, device=x.device) for x in (k_BSkD, v_BSkE)
        )

        def attend_backward(queries: slice, keys: slice) -> None:
            q, k, v = _grouped(q_BShD, queries, k_BSkD), _headed(k_BSkD, keys), _headed(v_BSkE, keys)
            dout, out = _grouped(dout_BShE, queries, k_BSkD), _grouped(out_BShE, queries, k_BSkD)
            scores, slope = _scores(q, k, queries, keys, spec)
            lse = lse_BhS[:, :, queries].to(exact).unflatten(1, (k_BSkD.shape[2], -1))
            p = (scores - lse[..., None]).exp_()
            dscores = p * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True))
            dscores *= spec.scale if slope is None else slope * spec.scale
            dq_BShD[:, queries] = _flat(dscores @ k).to(dq_BShD.dtype)
            dk_BkSD[:, :, keys] += (dscores.transpose(-1, -2) @ q).sum(2)
            dv_BkSE[:, :, keys] += (p.transpose(-1, -2) @ dout).sum(2)

        for queries, keys in _blocks(q_BShD, spec):
            attend_backward(queries, keys)
        return dq_BShD, dk_BkSD.transpose(1, 2).to(k_BSkD.dtype), dv_BkSE.transpose(1, 2).to(v_BSkE.dtype)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _blocks(q_BShD: Tensor, spec: AttentionSpec) -> Iterable[tuple[slice, slice]]:
    """Return blocks of queries, each with the keys that any of its queries sees.

    For fake tensors, which a rehearsal measures memory with, only the largest block is returned.
    """
    blocks = _all_blocks(q_BShD, spec)
    return [max(blocks, key=_pairs)] if isinstance(q_BShD, FakeTensor) else blocks


def _pairs(block: tuple[slice, slice]) -> int:
    queries, keys = block
    return int((queries.stop - queries.start) * (keys.stop - keys.start))


def _all_blocks(q_BShD: Tensor, spec: AttentionSpec) -> Iterator[tuple[slice, slice]]:
    batch, length, heads, _ = q_BShD.shape
    rows = min(1024, max(16, BLOCK_SCORES // (batch * heads * length)))
    for start in range(0, length, rows):
        end = min(start + rows, length)
        reach = length if spec.window is None else spec.window - 1
        last = end if spec.causal else min(length, end + reach)
        yield slice(start, end), slice(max(0, start - reach), last)


def _grouped(x_BShD: Tensor, queries: slice, k_BSkD: Tensor) -> Tensor:
    """[B, n, h, D] of one block -> [B, k, g, n, D]."""
    x_BhnD = x_BShD[:, queries].transpose(1, 2).to(_exact(x_BShD.dtype))
    return x_BhnD.unflatten(1, (k_BSkD.shape[2], -1))


def _headed(x_BSkD: Tensor, keys: slice) -> Tensor:
    """[B, m, k, D] of the keys in reach -> [B, k, 1, m, D]."""
    return x_BSkD[:, keys].transpose(1, 2).to(_exact(x_BSkD.dtype)).unsqueeze(2)


def _flat(x_BkgnD: Tensor) -> Tensor:
    """[B, k, g, n, D] -> [B, n, h, D]."""
    return x_BkgnD.flatten(1, 2).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, queries: slice, keys: slice, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """Scaled, capped and masked scores [B, k, g, n, m], and the slope of the cap where there is one."""
    scores = (q @ k.transpose(-1, -2)).mul_(spec.scale)
    slope = None
    if spec.softcap is not None:
        bent = torch.tanh(scores / spec.softcap)
        scores, slope = bent * spec.softcap, 1 - bent.square()
    n = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    m = torch.arange(keys.start, keys.stop, device=q.device)
    hidden = m > n if spec.causal else torch.zeros_like(m > n)
    if spec.window is not None:
        hidden |= (n - m).abs() >= spec.window
    return scores.masked_fill_(hidden, -torch.inf), slope
