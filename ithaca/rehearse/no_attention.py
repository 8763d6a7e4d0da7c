"""A step without attention: zeros in place of the kernels' outputs and gradients.

At a million tokens attention takes nine tenths of a step and more, and saves no bytes beyond its call. So a run that only
measures bytes leaves it out.
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
    """Inside, every choice of a kernel returns one that computes nothing."""

    def choose(*args: Any, **options: Any) -> Any:
        # A rehearsed row is one document, so no varlen kernel is needed.
        return None if options.get("varlen") else _NoAttention()

    chosen = local.choose
    local.choose = choose
    try:
        yield
    finally:
        local.choose = chosen


class _NoAttention(Kernel):
    """A kernel that computes nothing and returns zeros."""

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
