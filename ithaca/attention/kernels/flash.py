"""FlashAttention-2 as part of torch, dense and varlen, with sliding windows.

`q_BShD, k_BSkD, v_BSkE -> out_BShE, lse_BhS`, or `q_ThD, k_TkD, v_TkE -> out_ThE, lse_hT`. Fewer kv heads than query
heads are native. The operators take the sequence dim before the heads, so nothing is transposed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ithaca.attention.kernels import aten
from ithaca.attention.kernels.flash_family import FlashFamily, window_sides
from ithaca.attention.kernels.interface import HALF_DTYPES, QKV, AttentionSpec, Gradients, cuda_refusal


class FlashKernel(FlashFamily):
    """Windows and any head sizes up to 256, fp16 or bf16; no softcap."""

    name = "flash"

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        refused = cuda_refusal(q_BShD, HALF_DTYPES)
        if refused:
            return refused
        if spec.softcap is not None:
            return f"torch's FlashAttention has no softcap, got softcap={spec.softcap}"
        return self._size_refusal(q_BShD, v_BSkE.shape[-1])

    def _size_refusal(self, q_BShD: Tensor, value_size: int) -> str | None:
        size, _ = self.padded_sizes(q_BShD.shape[-1], value_size)
        if size > 256:
            return f"head sizes go up to 256, got {q_BShD.shape[-1]} and {value_size}"
        capability = torch.cuda.get_device_capability(q_BShD.device)
        # These GPUs have too little shared memory for the backward of this range; torch's dispatcher has the same rule.
        # https://github.com/Dao-AILab/flash-attention/issues/277
        if 192 < size <= 224 and (capability in ((8, 6), (8, 7), (8, 9)) or capability[0] == 12):
            return f"head size {size} has no backward on compute capability {capability[0]}.{capability[1]}"
        return None

    def run_forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        window = window_sides(spec)
        return aten.flash_forward(*qkv.tensors, *_extent(qkv), causal=spec.causal, scale=spec.scale, window=window)

    def run_backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Gradients:
        window = window_sides(spec)
        return aten.flash_backward(
            dout, *qkv.tensors, out, lse, *_extent(qkv), causal=spec.causal, scale=spec.scale, window=window
        )


def _extent(qkv: QKV) -> tuple[Tensor | None, int]:
    """Return the document offsets (None if dense) and the longest length."""
    return (None, qkv.q.shape[1]) if qkv.bounds is None else (qkv.bounds.offsets, qkv.bounds.longest)
