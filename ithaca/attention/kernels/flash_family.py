"""Base class of the FlashAttention kernels: pads head sizes and cuts the outputs, for dense and varlen calls.

A kernel of this family implements `run_forward` and `run_backward`, which get padded tensors of the dense
shape [B, S, h, D] or, with bounds, the varlen shape [T, h, D]. Padding with zero columns is exact: they add
nothing to the scores (the scale is explicit) and only zero columns to the output and the gradients.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor
from torch.nn.functional import pad

from ithaca.attention.kernels.interface import QKV, AttentionSpec, Gradients, Kernel


class FlashFamily(Kernel):
    """Kernel of the FlashAttention kind, given by two functions of padded tensors."""

    varlen = True

    @abstractmethod
    def run_forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Return `(out, lse)`, lse [B, h, S] or [h, T] in fp32."""

    @abstractmethod
    def run_backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Gradients:
        """Return `(dq, dk, dv)`; `lse` is contiguous."""

    def padded_sizes(self, size: int, value_size: int) -> tuple[int, int]:
        """Return the padded head size of q and k, and that of v."""
        common = multiple_of_8(max(size, value_size))
        return common, common

    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        self.check(qkv)
        out, lse = self.run_forward(self.pad_head_sizes(qkv), spec)
        return out[..., : qkv.v.shape[-1]], lse

    def backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Gradients:
        return cut_head_sizes(self.run_backward(*self.padded(dout, qkv, out), lse.contiguous(), spec), qkv)

    def padded(self, dout: Tensor, qkv: QKV, out: Tensor) -> tuple[Tensor, QKV, Tensor]:
        wide = self.pad_head_sizes(qkv)
        value_size = wide.v.shape[-1]
        return pad_head_size(dout, value_size), wide, pad_head_size(out, value_size)

    def pad_head_sizes(self, qkv: QKV) -> QKV:
        size, value_size = self.padded_sizes(qkv.q.shape[-1], qkv.v.shape[-1])
        q, k, v = pad_head_size(qkv.q, size), pad_head_size(qkv.k, size), pad_head_size(qkv.v, value_size)
        return QKV(q, k, v, qkv.bounds, qkv.sinks)


def cut_head_sizes(grads: Gradients, qkv: QKV) -> Gradients:
    """Return the gradients without the columns of padding."""
    size, value_size = qkv.q.shape[-1], qkv.v.shape[-1]
    return grads[0][..., :size], grads[1][..., :size], grads[2][..., :value_size]


def pad_head_size(x: Tensor, size: int) -> Tensor:
    """Pad the last dim with zeros up to `size`; return the tensor itself if it has that size."""
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))


def multiple_of_8(size: int) -> int:
    return -(-size // 8) * 8


def window_sides(spec: AttentionSpec) -> tuple[int, int]:
    """Return the numbers of keys that a query sees before and after itself; -1 for no limit but the causal mask."""
    if spec.window is None:
        return -1, -1
    return spec.window - 1, 0 if spec.causal else spec.window - 1
