"""The flash-attn packages, where they are installed: FlashAttention-2 (`flash_attn`) and -3 (`flash_attn_3`).

Written from the packages' sources (2.8 and 3.0) and never run: `tested` is False, and only a user who names a kernel
gets it. The functions called here are private to the packages. The packages are imported inside the calls. Shapes as
in `flash.py`; both also have a softcap.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ithaca.attention.kernels.flash_family import FlashFamily, multiple_of_8, window_sides
from ithaca.attention.kernels.interface import (
    HALF_DTYPES,
    QKV,
    AttentionSpec,
    DocumentOffsets,
    Gradients,
    cuda_refusal,
    must_be_deterministic,
)


class FlashAttn2Kernel(FlashFamily):
    """FlashAttention-2 of the package flash-attn, 2.7 or newer; never run here."""

    name = "flash_attn_2"
    tested = False

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        if find_spec("flash_attn_2_cuda") is None:
            return "the package flash-attn is not installed: pip install flash-attn"
        size, _ = self.padded_sizes(q_BShD.shape[-1], v_BSkE.shape[-1])
        if size > 256:
            return f"head sizes go up to 256, got {q_BShD.shape[-1]} and {v_BSkE.shape[-1]}"
        return cuda_refusal(q_BShD, HALF_DTYPES)

    def run_forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        package = import_module("flash_attn.flash_attn_interface")
        settings = {**_settings(spec), "causal": spec.causal, "dropout_p": 0.0}
        settings |= {"alibi_slopes": None, "return_softmax": False}
        if qkv.bounds is None:
            results = package._flash_attn_forward(*qkv.tensors, **settings)
        else:
            results = package._flash_attn_varlen_forward(*qkv.tensors, **_extents(qkv.bounds), **settings)
        return results[0], results[1]

    def run_backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Gradients:
        package = import_module("flash_attn.flash_attn_interface")
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv.tensors)
        settings = {**_settings(spec), "causal": spec.causal, "dropout_p": 0.0}
        settings |= {"alibi_slopes": None, "deterministic": must_be_deterministic()}
        tensors = (dout, *qkv.tensors, out, lse, dq, dk, dv)
        if qkv.bounds is None:
            package._flash_attn_backward(*tensors, **settings)
        else:
            package._flash_attn_varlen_backward(*tensors, **_extents(qkv.bounds), **settings)
        return dq, dk, dv


class FlashAttn3Kernel(FlashFamily):
    """FlashAttention-3 of the package flash_attn_3 (the `hopper` folder of flash-attention); never run here."""

    name = "flash_attn_3"
    tested = False

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        if find_spec("flash_attn_3") is None:
            return "the package flash_attn_3 is not installed: build it in flash-attention's folder `hopper`"
        refused = cuda_refusal(q_BShD, HALF_DTYPES)
        if refused:
            return refused
        capability = torch.cuda.get_device_capability(q_BShD.device)
        if capability[0] != 9:
            return f"it needs a Hopper GPU (capability 9.0), got {capability[0]}.{capability[1]}"
        size = max(self.padded_sizes(q_BShD.shape[-1], v_BSkE.shape[-1]))
        if size > 256:
            return f"head sizes go up to 256, got {q_BShD.shape[-1]} and {v_BSkE.shape[-1]}"
        if size > 192 and must_be_deterministic():
            return f"its backward is not deterministic at head size {size}"
        return None

    def padded_sizes(self, size: int, value_size: int) -> tuple[int, int]:
        """Return the sizes themselves in the two uneven ranges that are native, else one common size."""
        wide, wide_value = multiple_of_8(size), multiple_of_8(value_size)
        if (128 < wide <= 192 and 96 < wide_value <= 128) or (wide <= 64 and wide_value <= 256):
            return wide, wide_value
        return super().padded_sizes(size, value_size)

    def run_forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        extents = {} if qkv.bounds is None else _extents(qkv.bounds)
        results = _flash_attn_3()._flash_attn_forward(*qkv.tensors, **extents, **_settings(spec), causal=spec.causal)
        return results[0], results[1]

    def run_backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Gradients:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv.tensors)
        settings = {**_settings(spec), "is_causal": spec.causal, "deterministic": must_be_deterministic()}
        extents = {} if qkv.bounds is None else _extents(qkv.bounds)
        _flash_attn_3()._flash_attn_backward(dout, *qkv.tensors, out, lse, dq=dq, dk=dk, dv=dv, **extents, **settings)
        return dq, dk, dv


def _flash_attn_3() -> ModuleType:
    """Import the interface, which releases put beside the package or inside it."""
    beside = find_spec("flash_attn_interface") is not None
    return import_module("flash_attn_interface" if beside else "flash_attn_3.flash_attn_interface")


def _settings(spec: AttentionSpec) -> dict[str, float | int | bool | None]:
    """Return the arguments that have the same names in both packages."""
    left, right = window_sides(spec)
    return {
        "softmax_scale": spec.scale,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": spec.softcap or 0.0,
    }


def _extents(bounds: DocumentOffsets) -> dict[str, Tensor | int]:
    return {
        "cu_seqlens_q": bounds.offsets,
        "cu_seqlens_k": bounds.offsets,
        "max_seqlen_q": bounds.longest,
        "max_seqlen_k": bounds.longest,
    }
