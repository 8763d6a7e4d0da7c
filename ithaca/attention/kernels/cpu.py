"""Attention on the CPU: torch's flash kernel where it applies, the blockwise kernel otherwise.

`q_BShD, k_BSkD, v_BSkE -> out_BShE, lse_BhS`, any float dtype. torch's kernel is exact in fp64 and takes fewer kv
heads than query heads, in both directions. It has no window, no softcap, and one size for all heads.
"""

from __future__ import annotations

from torch import Tensor

from ithaca.attention.kernels import aten
from ithaca.attention.kernels.blockwise import BlockwiseKernel
from ithaca.attention.kernels.interface import QKV, AttentionSpec, Gradients, Kernel


class CpuKernel(Kernel):
    """Kernel of all settings, on the CPU."""

    name = "cpu"
    _blockwise = BlockwiseKernel()

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        return None if q_BShD.device.type == "cpu" else f"it runs on the CPU, got a tensor on {q_BShD.device.type}"

    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        self.check(qkv)
        if not _fits_torch(qkv, spec):
            return self._blockwise.forward(qkv, spec)
        out_BhSE, lse_BhS = aten.cpu_forward(*qkv.by_head(), causal=spec.causal, scale=spec.scale)
        return out_BhSE.transpose(1, 2), lse_BhS

    def backward(
        self, dout_BShE: Tensor, qkv: QKV, out_BShE: Tensor, lse_BhS: Tensor, spec: AttentionSpec
    ) -> Gradients:
        if not _fits_torch(qkv, spec):
            return self._blockwise.backward(dout_BShE, qkv, out_BShE, lse_BhS, spec)
        dout, out = dout_BShE.transpose(1, 2), out_BShE.transpose(1, 2)
        grads = aten.cpu_backward(dout, *qkv.by_head(), out, lse_BhS, causal=spec.causal, scale=spec.scale)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


def _fits_torch(qkv: QKV, spec: AttentionSpec) -> bool:
    """True if torch's own kernel computes this call."""
    same_size = qkv.q.shape[-1] == qkv.v.shape[-1]
    return same_size and spec.softcap is None and not spec.masks_anything(qkv.q.shape[1])
