"""A step without attention: outputs and gradients of zeros where the kernels' would be.

At a million tokens attention is nine tenths of a step and more, and keeps no byte longer than its call. So where only
bytes are asked, what other layers add to them, it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ithaca.attention import local
from ithaca.attention.kernels.interface import QKV, AttentionSpec, Gradients, Kernel


@contextmanager
def without_attention() -> Iterator[None]:
    """Inside, whatever kernel would be chosen has this one in its place."""
    chosen = local.choose
    local.choose = _choose
    try:
        yield
    finally:
        local.choose = chosen


def _choose(*asked: Any, **more: Any) -> Any:
    return None if more.get("varlen") else _Bare()


class _Bare(Kernel):
    """A kernel that computes nothing; a rehearsed row is one document."""

    name = "bare"

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        return None

    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        batch, length, heads = qkv.q.shape[:3]
        exact = torch.promote_types(qkv.q.dtype, torch.float32)
        lse_BhS = qkv.q.new_zeros((batch, heads, length), dtype=exact)
        return qkv.v.new_zeros(batch, length, heads, qkv.v.shape[-1]), lse_BhS

    def backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Gradients:
        return _zeros(qkv.q), _zeros(qkv.k), _zeros(qkv.v)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)
