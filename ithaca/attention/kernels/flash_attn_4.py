"""FlashAttention-4 of the package flash-attn-4 (written in CuTe): the fastest kernel on Hopper.

`q_BShD, k_BSkD, v_BSkE -> out_BShE, lse_BhS`, or `q_ThD, k_TkD, v_TkE -> out_ThE, lse_hT`. Windows, softcap, sinks,
fewer kv heads than query heads and head sizes up to 256 are native. One call takes all documents of a row, long and
short.

The functions called here are private to the package and change from one beta to the next: a version that is not in
CHECKED is refused. A test holds the signatures of the checked versions against the package's source.

The first call of each form compiles for about 6 s: of each pair of head sizes, ratio of query to kv heads, mask,
dense or varlen. Lengths compile nothing. What was compiled is kept on disk, for later processes.

Head sizes are padded to multiples of 32: at other sizes (8, 16, 48, 72, 112) the backward of 4.0.0b36 gave gradients
that were wrong by their own size where query heads share kv heads, without an error.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ithaca.attention.kernels.flash_family import FlashFamily, cut_head_sizes, pad_head_size, window_sides
from ithaca.attention.kernels.interface import (
    HALF_DTYPES,
    QKV,
    AttentionSpec,
    Gradients,
    cuda_refusal,
    must_be_deterministic,
)

PACKAGE = "flash-attn-4"
CHECKED = ("4.0.0b36",)
# Head sizes of q and k, and of v, in multi-head latent attention.
MLA = (192, 128)


class FlashAttn4Kernel(FlashFamily):
    """Hopper: any head sizes up to 256. Datacenter Blackwell, on which it was not run: up to 128, or 192 with 128."""

    name = "flash_attn_4"
    takes_sinks = True
    # As many as were run, in rows and in documents; beyond that nothing is known.
    most_elements = 2_280_000_000
    more_keys = True

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        refused = package_refusal() or cuda_refusal(q_BShD, HALF_DTYPES)
        if refused:
            return refused
        capability = torch.cuda.get_device_capability(q_BShD.device)
        if capability[0] not in (9, 10):
            return f"it needs a Hopper or datacenter Blackwell GPU, got capability {capability[0]}.{capability[1]}"
        size, value_size = q_BShD.shape[-1], v_BSkE.shape[-1]
        sizes = self.padded_sizes(size, value_size)
        if max(sizes) > 256:
            return f"head sizes go up to 256, got {size} and {value_size}"
        if capability[0] == 10 and max(sizes) > 128 and (sizes != MLA or q_BShD.shape[-2] != v_BSkE.shape[-2]):
            return f"on Blackwell head sizes go up to 128, or 192 with values of 128, got {size} and {value_size}"
        return None

    def padded_sizes(self, size: int, value_size: int) -> tuple[int, int]:
        """Return multiples of 32 that are equal but for the pair of multi-head latent attention."""
        wide, wide_value = _multiple_of_32(size), _multiple_of_32(value_size)
        common = max(wide, wide_value)
        return MLA if (wide, wide_value) == MLA else (common, common)

    def pad_head_sizes(self, qkv: QKV) -> QKV:
        wide = super().pad_head_sizes(qkv)
        # The backward of shared kv heads takes one size.
        if wide.q.shape[-2] == wide.k.shape[-2] or wide.q.shape[-1] == wide.v.shape[-1]:
            return wide
        return replace(wide, v=pad_head_size(wide.v, wide.q.shape[-1]))

    def run_forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        call = _extents(qkv) | _settings(spec) | {"learnable_sink": qkv.sinks}
        results = _package()._flash_attn_fwd(*qkv.tensors, return_lse=True, **call)
        return results[0], results[1]

    def run_backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Gradients:
        results = _backward(dout, replace(qkv, sinks=None), out, lse, spec)
        return results[0], results[1], results[2]

    def backward_with_sinks(
        self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Gradients, Tensor]:
        dq, dk, dv, dsinks = _backward(*self.padded(dout, qkv, out), lse.contiguous(), spec)
        return cut_head_sizes((dq, dk, dv), qkv), dsinks


def _backward(dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> tuple[Tensor, ...]:
    call = _extents(qkv) | _settings(spec) | {"learnable_sink": qkv.sinks, "deterministic": must_be_deterministic()}
    results: tuple[Tensor, ...] = _package()._flash_attn_bwd(*qkv.tensors, out, dout, lse, **call)
    return results


def _multiple_of_32(size: int) -> int:
    return -(-size // 32) * 32


def package_refusal() -> str | None:
    """Return a refusal where the package is missing, or of a version that was not checked; else None."""
    version = _version()
    if version is None:
        return "the package flash-attn-4 is not installed: pip install 'ithaca[fa4]'"
    if version not in CHECKED:
        known = ", ".join(CHECKED)
        return f"flash-attn-4 {version} was not checked, {known} was: pip install flash-attn-4=={CHECKED[-1]}"
    return None


@cache
def _version() -> str | None:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


@cache
def _package() -> Any:
    interface, store = (import_module(f"flash_attn.cute.{name}") for name in ("interface", "cache_utils"))
    # Without a folder that they can be kept in, kernels are compiled anew in each process.
    with suppress(OSError):
        keep_compiled(interface, store, Path.home() / ".cache" / "ithaca" / "flash-attn-4")
    return interface


def keep_compiled(interface: Any, store: Any, folder: Path) -> None:
    """Keep compiled kernels on disk, unless the user has switched the package's own store on.

    That store is off by default, and below /tmp, where other users could put kernels.
    """
    if store.CUTE_DSL_CACHE_ENABLED:
        return
    folder.mkdir(parents=True, exist_ok=True)
    store.CUTE_DSL_CACHE_ENABLED, store.CUTE_DSL_CACHE_DIR = True, str(folder)
    for name, function in vars(interface).items():
        if isinstance(getattr(function, "compile_cache", None), store.JITCache):
            function.compile_cache = store.get_jit_cache(name)


def _settings(spec: AttentionSpec) -> dict[str, Any]:
    left, right = window_sides(spec)
    return {
        "softmax_scale": spec.scale,
        "causal": spec.causal,
        "softcap": spec.softcap or 0.0,
        # -1 means no limit; a causal call without a window is not to be taken for one with a window.
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if right < 0 else right,
    }


def _extents(qkv: QKV) -> dict[str, Any]:
    if qkv.bounds is None:
        return {}
    offsets, longest = qkv.bounds.offsets, qkv.bounds.longest
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
