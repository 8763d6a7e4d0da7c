"""Attention on the CPU: torch's flash kernel where it applies, the blockwise path otherwise.

`q_BShD, k_BSkD, v_BSkE -> out_BShE, lse_BhS`, any float dtype. torch's kernel is exact in fp64 and native
in fewer kv heads, in both directions; it knows no window, no softcap, and one head size only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ithaca.attention.kernels.base import DenseOnly, check_groups, windowed
from ithaca.attention.kernels.blockwise import BlockwiseKernel
from ithaca.attention.kernels.interface import AttentionSpec


class CpuKernel(DenseOnly):
    """Everything, on the CPU."""

    name = "cpu"
    _blockwise = BlockwiseKernel()

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        return None if q_BShD.device.type == "cpu" else f"it runs on the CPU, got a tensor on {q_BShD.device.type}"

    def forward(self, q_BShD: Tensor, k_BSkD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        check_groups(q_BShD, k_BSkD)
        if not _plain(q_BShD, v_BSkE, spec):
            return self._blockwise.forward(q_BShD, k_BSkD, v_BSkE, spec)
        q, k, v = (x.transpose(1, 2) for x in (q_BShD, k_BSkD, v_BSkE))
        out_BhSE, lse_BhS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, spec.causal, scale=spec.scale
        )
        return out_BhSE.transpose(1, 2), lse_BhS

    def backward(
        self,
        dout_BShE: Tensor,
        q_BShD: Tensor,
        k_BSkD: Tensor,
        v_BSkE: Tensor,
        out_BShE: Tensor,
        lse_BhS: Tensor,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _plain(q_BShD, v_BSkE, spec):
            return self._blockwise.backward(dout_BShE, q_BShD, k_BSkD, v_BSkE, out_BShE, lse_BhS, spec)
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout_BShE, q_BShD, k_BSkD, v_BSkE, out_BShE))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse_BhS, 0.0, spec.causal, scale=spec.scale
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


def _plain(q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> bool:
    """Whether torch's kernel computes this."""
    same_size = q_BShD.shape[-1] == v_BSkE.shape[-1]
    return same_size and spec.softcap is None and not windowed(spec, q_BShD.shape[1])
