"""The attention kernels, and the choice among them.

`KERNELS` maps names to kernels, fastest first. `choose` picks one from device, dtype, shapes and what is
asked, or refuses with each kernel's reason. Importing this package imports neither triton nor a
flash-attn package, and asks no device anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, overload

from torch import Tensor

from ithaca.arguments import shown
from ithaca.attention.kernels.blockwise import BlockwiseKernel
from ithaca.attention.kernels.cpu import CpuKernel
from ithaca.attention.kernels.cudnn import CudnnKernel
from ithaca.attention.kernels.flash import FlashKernel
from ithaca.attention.kernels.flash_packages import FlashAttn2Kernel, FlashAttn3Kernel
from ithaca.attention.kernels.flex import FlexKernel
from ithaca.attention.kernels.interface import QKV, AttentionSpec, DocumentOffsets, Kernel
from ithaca.errors import UnsupportedError

_ORDERED: tuple[Kernel, ...] = (
    CudnnKernel(),
    FlashAttn3Kernel(),
    FlashAttn2Kernel(),
    FlashKernel(),
    FlexKernel(),
    CpuKernel(),
    BlockwiseKernel(),
)
KERNELS: Mapping[str, Kernel] = MappingProxyType({kernel.name: kernel for kernel in _ORDERED})

# What "auto" may take. Not the flash-attn packages, which are untested here, and not blockwise, whose
# slowness on a GPU must be asked for.
AUTO = ("cudnn", "flash", "flex", "cpu")


@overload
def choose(
    name: str, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec, *, varlen: Literal[False] = False
) -> Kernel: ...


@overload
def choose(
    name: str, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec, *, varlen: Literal[True]
) -> Kernel | None: ...


def choose(name: str, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec, *, varlen: bool = False) -> Kernel | None:
    """The kernel called `name`, or for "auto" the fastest that does not refuse.

    With `varlen`, only kernels that have a varlen form, and None where there is none to be had.
    """
    if name != "auto":
        kernel = _named(name, q_BShD, v_BSkE, spec)
        return kernel if kernel.varlen or not varlen else None
    refusals = {}
    for candidate in (KERNELS[n] for n in AUTO if KERNELS[n].varlen or not varlen):
        refused = candidate.refusal(q_BShD, v_BSkE, spec)
        if refused is None:
            return candidate
        refusals[candidate.name] = refused
    if varlen:
        return None
    reasons = "; ".join(f"{n}: {reason}" for n, reason in refusals.items())
    raise UnsupportedError(f"no attention kernel for this call. {reasons}. Exact but slow: kernel='blockwise'")


def check_name(name: str) -> None:
    """Refuse a name no kernel has."""
    if not isinstance(name, str) or (name != "auto" and name not in KERNELS):
        raise UnsupportedError(f"no attention kernel is called {shown(name)}: use one of auto, {', '.join(KERNELS)}")


def _named(name: str, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> Kernel:
    check_name(name)
    refused = KERNELS[name].refusal(q_BShD, v_BSkE, spec)
    if refused is None:
        return KERNELS[name]
    works = next(n for n in (*AUTO, "blockwise") if KERNELS[n].refusal(q_BShD, v_BSkE, spec) is None)
    raise UnsupportedError(f"the attention kernel {name!r} cannot do this call: {refused}. Use {works!r}")


__all__ = ["AUTO", "KERNELS", "QKV", "AttentionSpec", "DocumentOffsets", "Kernel", "check_name", "choose"]
