"""One signature over all attention kernels.

A kernel is a pair of plain functions of tensors, outside autograd: `forward` gives `(out, lse)` and `backward` takes
them back. Both take a `QKV`, in one of two forms:

    dense                             q [B, S, h, D]   k [B, S, k, D]   v [B, S, k, E]   out [B, S, h, E]   lse [B, h, S]
    varlen (bounds of documents       q [T, h, D]      k [T, k, D]      v [T, k, E]      out [T, h, E]      lse [h, T]
    that are laid end to end)

In the dense form every row is one document of S tokens. Only kernels whose `varlen` is true take the other.

`h` is a multiple of `k`: query head i reads key-value head i // (h / k). Tensors may be strided views; only their last
dim is contiguous. `lse` is the natural logarithm of the sum of exponentials of the scaled (and capped) scores, fp32, or
fp64 for fp64 inputs. `backward` computes from whatever `(out, lse)` it is given: with attention sinks those are
rescaled, and the same formula stays exact.

To add a kernel, derive from `Kernel` in a file of its own and put it into the list of `kernels/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
HALF_DTYPES = (torch.float16, torch.bfloat16)


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

    def hides(self, length: int) -> bool:
        """True if the window hides something in a row of `length` tokens."""
        return self.window is not None and self.window < length


@dataclass(frozen=True, slots=True)
class DocumentOffsets:
    """Documents laid end to end: int32 offsets on the device, N + 1 of them, and the longest length."""

    offsets: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class QKV:
    """The tensors of one call: dense, or varlen where `bounds` are given."""

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: DocumentOffsets | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def by_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """Dense q, k and v as torch's operators want them: `[B, h, S, D]` views."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


class Kernel(ABC):
    """What every kernel offers; `attention/local.py` is the only caller."""

    name: ClassVar[str]
    varlen: ClassVar[bool] = False
    # False: written from a package's source and not run yet, so that only who asks for it by name gets it.
    tested: ClassVar[bool] = True

    @abstractmethod
    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        """Why this kernel cannot do this call exactly, or None. Reads shapes, dtype and device only."""

    @abstractmethod
    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Return `(out, lse)`."""

    @abstractmethod
    def backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Gradients:
        """Return `(dq, dk, dv)`."""

    def check(self, qkv: QKV) -> None:
        """Stop a call that this kernel might answer wrongly: our own callers make none."""
        q, k = qkv.q.shape[-2], qkv.k.shape[-2]
        assert q % k == 0, f"{q} query heads over {k} key-value heads"
        if qkv.bounds is not None and not self.varlen:
            raise NotImplementedError(f"the kernel {self.name!r} has no varlen form: call it document by document")


def cuda_refusal(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Say so where `x` is not on an NVIDIA GPU of capability 8.0 or newer, or not of one of `dtypes`."""
    if not x.is_cuda or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, got a tensor on {x.device.type}"
    capability = torch.cuda.get_device_capability(x.device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, got {capability[0]}.{capability[1]}"
    if x.dtype not in dtypes:
        return f"it takes {', '.join(str(d).removeprefix('torch.') for d in dtypes)}, got {x.dtype}"
    return None


def must_be_deterministic() -> bool:
    """True if torch raises, not merely warns, on what does not repeat bit for bit."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
