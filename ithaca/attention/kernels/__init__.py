"""Table of the attention kernels, and the choice among them.

`KERNELS` maps names to kernels, fastest first. `choose` picks one by device, dtype, shapes and settings, or refuses
with each kernel's reason. `interface.py` lists the steps to add a kernel. Importing this package imports neither triton
nor a flash-attn package, and queries no device.
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
from ithaca.attention.kernels.flash_attn_4 import FlashAttn4Kernel
from ithaca.attention.kernels.flash_packages import FlashAttn2Kernel, FlashAttn3Kernel
from ithaca.attention.kernels.flex import FlexKernel
from ithaca.attention.kernels.interface import QKV, AttentionSpec, DocumentOffsets, Kernel
from ithaca.errors import UnsupportedError

# Fastest first. What each computes is in its `refusal`; in short:
_ORDERED: tuple[Kernel, ...] = (
    FlashAttn4Kernel(),  # dense, varlen, window, softcap; head sizes to 256; package flash-attn-4, Hopper's fastest
    CudnnKernel(),  # dense, head sizes to 128; the fastest without a package
    FlashAttn3Kernel(),  # dense, varlen, window, softcap; package flash_attn_3, Hopper; never run here
    FlashAttn2Kernel(),  # dense, varlen, window, softcap; package flash-attn; never run here
    FlashKernel(),  # dense, varlen, window; head sizes to 256; part of torch
    FlexKernel(),  # dense, window, softcap; compiled
    CpuKernel(),  # everything, on the CPU
    BlockwiseKernel(),  # everything, everywhere, slow
)
KERNELS: Mapping[str, Kernel] = MappingProxyType({kernel.name: kernel for kernel in _ORDERED})

# Kernels that "auto" chooses from. Not the older flash-attn packages, which are untested here, and not blockwise, which is so
# slow on a GPU that only a user who names it gets it.
AUTO = ("flash_attn_4", "cudnn", "flash", "flex", "cpu")


@overload
def choose(
    name: str, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec, *, varlen: Literal[False] = False
) -> Kernel: ...


@overload
def choose(
    name: str, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec, *, varlen: Literal[True]
) -> Kernel | None: ...


def choose(name: str, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec, *, varlen: bool = False) -> Kernel | None:
    """Return the kernel called `name`, or for "auto" the fastest that does not refuse.

    With `varlen` return a kernel that has a varlen form; None if there is none.
    """
    if name != "auto":
        kernel = _named(name, q_BShD, v_BSkE, spec)
        return kernel if kernel.varlen or not varlen else None
    refusals = {}
    for candidate in (KERNELS[n] for n in AUTO if KERNELS[n].varlen or not varlen):
        refused = candidate.why_not(q_BShD, v_BSkE, spec)
        if refused is None:
            return candidate
        refusals[candidate.name] = refused
    if varlen:
        return None
    reasons = "; ".join(f"{n}: {reason}" for n, reason in refusals.items())
    slow = KERNELS["blockwise"].why_not(q_BShD, v_BSkE, spec) is None
    advice = ". Exact but slow: kernel='blockwise'" if slow else ""
    raise UnsupportedError(f"no attention kernel for this call. {reasons}{advice}")


def check_name(name: str) -> None:
    """Refuse a name that no kernel has."""
    if not isinstance(name, str) or (name != "auto" and name not in KERNELS):
        raise UnsupportedError(f"no attention kernel is called {shown(name)}: use one of auto, {', '.join(KERNELS)}")


def _named(name: str, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> Kernel:
    check_name(name)
    refused = KERNELS[name].why_not(q_BShD, v_BSkE, spec)
    if refused is None:
        return KERNELS[name]
    works = next((n for n in (*AUTO, "blockwise") if KERNELS[n].why_not(q_BShD, v_BSkE, spec) is None), None)
    advice = f"Use {works!r}" if works else "No kernel here can"
    raise UnsupportedError(f"the attention kernel {name!r} cannot do this call: {refused}. {advice}")


__all__ = ["AUTO", "KERNELS", "QKV", "AttentionSpec", "DocumentOffsets", "Kernel", "check_name", "choose"]
