"""What several kernels share: the checks every kernel makes, and the refusal of varlen calls.

Shapes are those of `interface.py`. Nothing here touches a device unless it is given a CUDA tensor.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ithaca.attention.kernels.interface import AttentionSpec, Bounds

HALF_DTYPES = (torch.float16, torch.bfloat16)


class DenseOnly:
    """A kernel without varlen: the caller goes document by document instead."""

    name: str
    varlen = False

    def forward_varlen(
        self, q_ThD: Tensor, k_TkD: Tensor, v_TkE: Tensor, bounds: Bounds, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        self._no_varlen()

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
        self._no_varlen()

    def _no_varlen(self) -> NoReturn:
        raise NotImplementedError(f"the kernel {self.name!r} has no varlen form: call it document by document")


def windowed(spec: AttentionSpec, length: int) -> bool:
    """Whether the window hides anything in a row of `length` tokens."""
    return spec.window is not None and spec.window < length


def check_groups(q: Tensor, k: Tensor) -> None:
    """Our own callers split unequal groups; a kernel given one might answer, wrongly."""
    assert q.shape[-2] % k.shape[-2] == 0, f"{q.shape[-2]} query heads over {k.shape[-2]} key-value heads"


def cuda_refusal(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Not an NVIDIA GPU of capability 8.0 or newer, or not one of `dtypes`."""
    if not x.is_cuda or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, got a tensor on {x.device.type}"
    capability = torch.cuda.get_device_capability(x.device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, got {capability[0]}.{capability[1]}"
    if x.dtype not in dtypes:
        return f"it takes {', '.join(str(d).removeprefix('torch.') for d in dtypes)}, got {x.dtype}"
    return None


def must_be_deterministic() -> bool:
    """Whether torch was told to raise, not merely warn, on what does not repeat bit for bit."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
