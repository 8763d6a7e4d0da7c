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
from ithaca.attention.kernels.interface import AttentionSpec, Bounds


@contextmanager
def without_attention() -> Iterator[None]:
    """Inside, whatever kernel would be chosen has this one in its place."""
    chosen = local.choose
    local.choose = _choose
    try:
        yield
    finally:
        local.choose = chosen


def _choose(*asked: Any, **more: Any) -> _Bare:
    return _Bare()


class _Bare:
    """A kernel that computes nothing."""

    name = "bare"
    varlen = True

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        return None

    def forward(self, q_BShD: Tensor, k_BSkD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        batch, length, heads = q_BShD.shape[:3]
        return v_BSkE.new_zeros(batch, length, heads, v_BSkE.shape[-1]), _lse(q_BShD, (batch, heads, length))

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
        return _zeros(q_BShD), _zeros(k_BSkD), _zeros(v_BSkE)

    def forward_varlen(
        self, q_ThD: Tensor, k_TkD: Tensor, v_TkE: Tensor, bounds: Bounds, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        length, heads = q_ThD.shape[:2]
        return v_TkE.new_zeros(length, heads, v_TkE.shape[-1]), _lse(q_ThD, (heads, length))

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
        return _zeros(q_ThD), _zeros(k_TkD), _zeros(v_TkE)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def _lse(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
