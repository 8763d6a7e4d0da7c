"""Attention on the CPU: torch's flash kernel where it applies, the blockwise path otherwise.

`q_BShD, k_BSkD, v_BSkE -> out_BShE, lse_BhS`, any float dtype. torch's kernel is exact in fp64 and native
in fewer kv heads, in both directions; it knows no window, no softcap, and one head size only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ithaca.attention.kernels.blockwise import BlockwiseKernel
from ithaca.attention.kernels.interface import QKV, AttentionSpec, Gradients, Kernel


class CpuKernel(Kernel):
    """Everything, on the CPU."""

    name = "cpu"
    _blockwise = BlockwiseKernel()

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        return None if q_BShD.device.type == "cpu" else f"it runs on the CPU, got a tensor on {q_BShD.device.type}"

    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        self.check(qkv)
        if not _plain(qkv, spec):
            return self._blockwise.forward(qkv, spec)
        out_BhSE, lse_BhS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *qkv.by_head(), 0.0, spec.causal, scale=spec.scale
        )
        return out_BhSE.transpose(1, 2), lse_BhS

    def backward(
        self, dout_BShE: Tensor, qkv: QKV, out_BShE: Tensor, lse_BhS: Tensor, spec: AttentionSpec
    ) -> Gradients:
        if not _plain(qkv, spec):
            return self._blockwise.backward(dout_BShE, qkv, out_BShE, lse_BhS, spec)
        dout, out = dout_BShE.transpose(1, 2), out_BShE.transpose(1, 2)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, *qkv.by_head(), out, lse_BhS, 0.0, spec.causal, scale=spec.scale
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


def _plain(qkv: QKV, spec: AttentionSpec) -> bool:
    """True if torch's kernel computes this."""
    same_size = qkv.q.shape[-1] == qkv.v.shape[-1]
    return same_size and spec.softcap is None and not spec.hides(qkv.q.shape[1])
