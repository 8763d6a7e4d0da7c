"""The frame around the FlashAttention kernels: head sizes padded, outputs cut, dense and varlen alike.

A kernel of this family fills in `run_forward` and `run_backward`, which see padded tensors of the dense
shape [B, S, h, D] (`bounds` is None) or the varlen shape [T, h, D]. Zero columns are exact: they add
nothing to the scores (the scale is explicit) and only zero columns to the output and the gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor
from torch.nn.functional import pad

from ithaca.attention.kernels.base import check_groups
from ithaca.attention.kernels.interface import AttentionSpec, Bounds


class FlashFamily(ABC):
    """Dense and varlen calls reduced to two functions."""

    varlen = True

    @abstractmethod
    def run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """`(out, lse)` with lse [B, h, S] or [h, T], fp32."""

    @abstractmethod
    def run_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bounds: Bounds | None,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)`; `lse` is contiguous."""

    def padded_sizes(self, size: int, value_size: int) -> tuple[int, int]:
        """The head sizes of q and k, and of v, that the kernel is called with."""
        common = multiple_of_8(max(size, value_size))
        return common, common

    def forward(self, q_BShD: Tensor, k_BSkD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        return self._forward(q_BShD, k_BSkD, v_BSkE, None, spec)

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
        return self._backward(dout_BShE, q_BShD, k_BSkD, v_BSkE, out_BShE, lse_BhS, None, spec)

    def forward_varlen(
        self, q_ThD: Tensor, k_TkD: Tensor, v_TkE: Tensor, bounds: Bounds, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        return self._forward(q_ThD, k_TkD, v_TkE, bounds, spec)

    def backward_varlen(
        self,
        dout_ThE: Tensor,
        q_ThD: Tensor,
        k_TkD: Tensor,
        v_TkE: Tensor,
        out_ThE: Tensor,
        lse_hT: Tensor,
        bounds: Bounds,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(dout_ThE, q_ThD, k_TkD, v_TkE, out_ThE, lse_hT, bounds, spec)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        check_groups(q, k)
        size, value_size = self.padded_sizes(q.shape[-1], v.shape[-1])
        out, lse = self.run_forward(widen(q, size), widen(k, size), widen(v, value_size), bounds, spec)
        return out[..., : v.shape[-1]], lse

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bounds: Bounds | None,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        size, value_size = self.padded_sizes(q.shape[-1], v.shape[-1])
        wide_q, wide_k = widen(q, size), widen(k, size)
        wide_dout, wide_v, wide_out = (widen(x, value_size) for x in (dout, v, out))
        dq, dk, dv = self.run_backward(wide_dout, wide_q, wide_k, wide_v, wide_out, lse.contiguous(), bounds, spec)
        return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]


def widen(x: Tensor, size: int) -> Tensor:
    """Zero columns up to `size`; the tensor itself where there is nothing to add."""
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))


def multiple_of_8(size: int) -> int:
    return -(-size // 8) * 8


def window_sides(spec: AttentionSpec) -> tuple[int, int]:
    """How many keys before and after itself a query sees; -1 for all that the causal flag leaves."""
    if spec.window is None:
        return -1, -1
    return spec.window - 1, 0 if spec.causal else spec.window - 1
