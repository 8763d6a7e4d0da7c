"""One signature over all attention kernels.

A kernel is a pair of plain functions of tensors, outside autograd: `forward` gives `(out, lse)` and
`backward` takes them back. Two forms:

* dense: `q_BShD, k_BSkD, v_BSkE` -> `out_BShE, lse_BhS`. Every row is one document of S tokens.
* varlen (only where `varlen` is true): `q_ThD, k_TkD, v_TkE` and the bounds of the documents laid end
  to end -> `out_ThE, lse_hT`.

`h` is a multiple of `k`: query head i reads key-value head i // (h / k). Tensors may be strided views;
only their last dim is contiguous. `lse` is the natural logarithm of the sum of exponentials of the
scaled (and capped) scores, fp32, or fp64 for fp64 inputs. `backward` computes from whatever `(out, lse)`
it is given: with attention sinks those are rescaled, and the same formula stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What is computed, apart from the tensors.

    `window`: a query sees the keys less than `window` tokens away (before it, and after it too when
    not causal). `softcap`: scores become `softcap * tanh(scores / softcap)` before the mask.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Documents laid end to end: int32 offsets on the device, N + 1 of them, and the longest length."""

    offsets: Tensor
    longest: int


class Kernel(Protocol):
    """What every kernel offers; `attention/local.py` is the only caller."""

    name: str
    varlen: bool

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        """Why this kernel cannot do this call exactly, or None. Reads shapes, dtype and device only."""

    def forward(self, q_BShD: Tensor, k_BSkD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout_BShE: Tensor,
        q_BShD: Tensor,
        k_BSkD: Tensor,
        v_BSkE: Tensor,
        out_BShE: Tensor,
        lse_BhS: Tensor,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def forward_varlen(
        self, q_ThD: Tensor, k_TkD: Tensor, v_TkE: Tensor, bounds: Bounds, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]: ...

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
    ) -> tuple[Tensor, Tensor, Tensor]: ...
