"""Interface of the attention kernels, and how to add a kernel.

A kernel is a pair of plain functions of tensors, outside autograd: `forward` returns `(out, lse)` and `backward` takes
them. Both take a `QKV`, in one of two forms:

    dense                             q [B, S, h, D]   k [B, S, k, D]   v [B, S, k, E]   out [B, S, h, E]   lse [B, h, S]
    varlen (bounds of documents       q [T, h, D]      k [T, k, D]      v [T, k, E]      out [T, h, E]      lse [h, T]
    that are laid end to end)

In the dense form every row is one document of S tokens. Only kernels whose `varlen` is true take the other.

`h` is a multiple of `k`: query head i reads key-value head i // (h / k). Tensors may be strided views; only their last
dim is contiguous. `lse` is the natural logarithm of the sum of exponentials of the scaled (and capped) scores, fp32, or
fp64 for fp64 inputs. `backward` computes from whatever `(out, lse)` it is given: with attention sinks those are
rescaled, and the same formula stays exact. A kernel whose `takes_sinks` is true gets sinks, rescales by itself, and has
`backward_with_sinks`.

To add a kernel:

1. Write `kernels/<name>.py` with a class derived from `Kernel`: `name`, `varlen` (True if the second form works), and
   the methods `refusal`, `forward`, `backward`. Imports of optional packages stand inside the methods. A kernel of the
   flash-attn kind derives from `FlashFamily` (`flash_family.py`), which pads head sizes. `cpu.py` is a short example.
2. In `refusal` return a reason for every call that the kernel would compute wrongly, head sizes included.
   `cuda_refusal` checks device and dtype; with `must_be_deterministic()` a kernel refuses if its backward does not
   repeat. `most_elements`, `more_keys` and `largest_sizes` are guards: raise them only by what was run.
3. Add an instance to `_ORDERED` in `kernels/__init__.py`, at its rank in speed. The name is then valid everywhere
   (`kernel="<name>"`, run files, `--help`, `ithaca doctor`). Until someone has run the kernel set `tested = False`.
4. Add the name to `AUTO` in the same file if "auto" may choose the kernel.
5. Add an instance to the lists at the head of `tests/attention/test_kernels.py`, which compares outputs and gradients
   with dense attention; GPU kernels are compared by `benchmarks/exact.py` and timed by `benchmarks/kernels.py`.

`attention/local.py` cuts rows into documents and heads into equal groups, and applies sinks around kernels that do not
take them: a kernel needs none of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
HALF_DTYPES = (torch.float16, torch.bfloat16)
# Several kernels count elements in 32 bits. One H200, torch 2.11, q of 2.3e9 elements: dq of torch's FlashAttention over
# documents was wrong by 0.7 of its size, without an error; with 2.1e9 it was right.
INT32_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Settings of an attention call.

    `window`: a query sees the keys less than `window` tokens away (before it, and after it too when
    not causal). `softcap`: scores become `softcap * tanh(scores / softcap)` before the mask.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    def masks_anything(self, length: int) -> bool:
        """True if the window hides a key in a row of `length` tokens."""
        return self.window is not None and self.window < length


@dataclass(frozen=True, slots=True)
class DocumentOffsets:
    """Documents laid end to end: int32 offsets on the device, N + 1 of them, and the longest length."""

    offsets: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class QKV:
    """The tensors of one call: dense, or varlen where `bounds` are given. `sinks`: one extra score a query head, fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: DocumentOffsets | None = None
    sinks: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def by_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dense q, k and v as `[B, h, S, D]` views, the layout of torch's operators."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


class Kernel(ABC):
    """Base class of all kernels; `attention/local.py` is the only caller."""

    name: ClassVar[str]
    varlen: ClassVar[bool] = False
    # Most elements of q, k, v or out in one call: `attention/local.py` cuts larger calls by rows and heads.
    most_elements: ClassVar[int] = INT32_ELEMENTS
    # True: k may be longer than q, and the last query sees the last key. Other kernels align the first ones.
    more_keys: ClassVar[bool] = False
    # The largest head sizes of q and v, for trials of the kernel.
    largest_sizes: ClassVar[tuple[int, int]] = (256, 256)
    # True: `forward` takes `QKV.sinks`, and `backward_with_sinks` is there.
    takes_sinks: ClassVar[bool] = False
    # False: written from a package's source and never run, so never chosen by "auto".
    tested: ClassVar[bool] = True

    @abstractmethod
    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        """Return the reason that this kernel cannot compute the call exactly; None if it can.

        Reads shapes, dtype and device, no values.
        """

    @abstractmethod
    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Return `(out, lse)`."""

    @abstractmethod
    def backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Gradients:
        """Return `(dq, dk, dv)`."""

    def backward_with_sinks(
        self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Gradients, Tensor]:
        """Return `(dq, dk, dv)` and the gradient of the sinks, from the rescaled `(out, lse)` of `forward`."""
        raise NotImplementedError(f"the kernel {self.name!r} takes no sinks")

    def check(self, qkv: QKV) -> None:
        """Assert what the callers in this package guarantee."""
        q, k = qkv.q.shape[-2], qkv.k.shape[-2]
        assert q % k == 0, f"{q} query heads over {k} key-value heads"
        if qkv.bounds is not None and not self.varlen:
            raise NotImplementedError(f"the kernel {self.name!r} has no varlen form: call it document by document")
        elements = max(x.numel() for x in qkv.tensors)
        assert elements <= self.most_elements, f"{elements:,} elements for {self.name!r}: cut the call by rows or heads"

    def why_not(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        """Return the reason against this kernel for a call, that of its guards included; None if it is right."""
        queries, keys = q_BShD.shape[1], v_BSkE.shape[1]
        if queries != keys and not self.more_keys:
            return f"it takes as many keys as queries, got {queries} queries and {keys} keys"
        if queries > keys:
            return f"every query needs a key, got {queries} queries and {keys} keys"
        if keys * max(q_BShD.shape[-1], v_BSkE.shape[-1]) > self.most_elements:
            return f"it takes at most {self.most_elements:,} elements, and one head of {keys:,} tokens has more"
        return self.refusal(q_BShD, v_BSkE, spec)


def cuda_refusal(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Return a refusal unless `x` is on an NVIDIA GPU of capability 8.0 or newer and of one of `dtypes`; else None."""
    if not x.is_cuda or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, got a tensor on {x.device.type}"
    capability = torch.cuda.get_device_capability(x.device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, got {capability[0]}.{capability[1]}"
    if x.dtype not in dtypes:
        return f"it takes {', '.join(str(d).removeprefix('torch.') for d in dtypes)}, got {x.dtype}"
    return None


def must_be_deterministic() -> bool:
    """True if torch raises, not merely warns, on operations that do not repeat bit for bit."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
