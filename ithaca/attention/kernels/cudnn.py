"""cuDNN's fused attention through torch's ATen operators: the fastest dense kernel on Hopper.

`q_BShD, k_BSkD, v_BSkE -> out_BShE, lse_BhS`. The operators take [B, h, S, D] views; the output has q's memory
order. Fewer kv heads than query heads are native in both directions.

Invariant: `out`, `dout` and `lse` go into backward dense. torch caches cuDNN's plans by the shapes and strides of q, k
and v alone, and runs a cached plan on any `out`, `dout` and `lse`: other strides would be read wrongly, without an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ithaca.attention.kernels import aten
from ithaca.attention.kernels.flash import FlashKernel
from ithaca.attention.kernels.interface import (
    HALF_DTYPES,
    QKV,
    AttentionSpec,
    Gradients,
    Kernel,
    cuda_refusal,
    must_be_deterministic,
)
from ithaca.errors import UnsupportedError


class CudnnKernel(Kernel):
    """Attention without a window, causal or not, fp16 or bf16, head sizes up to 128 (or 192 with values of 128)."""

    name = "cudnn"
    largest_sizes = (128, 128)
    # The largest call compared with fp32 (benchmarks/results/exact.json). At 2.3e9 its dq and dk were wrong by half their
    # size, without an error.
    most_elements = 1_835_008 * 8 * 64
    # cuDNN refuses a document of one token.
    _single = FlashKernel()

    def refusal(self, q_BShD: Tensor, v_BSkE: Tensor, spec: AttentionSpec) -> str | None:
        refused = cuda_refusal(q_BShD, HALF_DTYPES) or _spec_refusal(spec, q_BShD.shape[1])
        return refused or _shape_refusal(q_BShD, v_BSkE.shape[-1])

    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        length = qkv.q.shape[1]
        assert spec.softcap is None, spec
        assert not spec.masks_anything(length), spec
        self.check(qkv)
        if length == 1:
            return self._single.forward(qkv, spec)
        # A new length costs a plan. Contiguous inputs get normal strides, so that they share plans; a strided view stays.
        q, k, v = ((_dense(x) if x.is_contiguous() else x).transpose(1, 2) for x in qkv.tensors)
        out_BhSE, lse_BhS1 = aten.cudnn_forward(q, k, v, causal=spec.causal, scale=spec.scale)
        # In this mode alone torch lays lse out by token; backward below assumes the layout by head.
        if not lse_BhS1.is_contiguous():
            raise UnsupportedError("TORCH_CUDNN_SDPA_AVOID_RECOMPILE is set: unset it, or choose the kernel 'flash'")
        return out_BhSE.transpose(1, 2), lse_BhS1.squeeze(-1)

    def backward(
        self, dout_BShE: Tensor, qkv: QKV, out_BShE: Tensor, lse_BhS: Tensor, spec: AttentionSpec
    ) -> Gradients:
        length = qkv.q.shape[1]
        if length == 1:
            return self._single.backward(dout_BShE, qkv, out_BShE, lse_BhS, spec)
        # q, k, v are dense here too: gradients are allocated dense, and some versions of torch require
        # that their strides equal those of q, k, v. A strided view costs one copy. dout gets out's strides, see
        # https://github.com/pytorch/pytorch/issues/134001
        dout, q, k, v, out = (_dense(x).transpose(1, 2) for x in (dout_BShE, *qkv.tensors, out_BShE))
        lse_BhS1 = _dense(lse_BhS).unsqueeze(-1)
        grads = aten.cudnn_backward(dout, q, k, v, out, lse_BhS1, causal=spec.causal, scale=spec.scale)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


def _dense(x: Tensor) -> Tensor:
    """Return `x` contiguous, with exactly the strides of a new tensor.

    A contiguous tensor may carry any stride in dims of size 1, as a document cut out of a single row does.
    """
    return x.contiguous().view(-1).view(x.shape)


def _spec_refusal(spec: AttentionSpec, length: int) -> str | None:
    if spec.masks_anything(length):
        return f"it has no sliding window, got window={spec.window} over {length} tokens"
    if spec.softcap is not None:
        return f"it has no softcap, got softcap={spec.softcap}"
    if must_be_deterministic():
        return "its backward is not deterministic, and torch.use_deterministic_algorithms(True) is set"
    return None


def _shape_refusal(q_BShD: Tensor, value_size: int) -> str | None:
    """Return a refusal by the rules of torch's own dispatcher for a differentiated call; None if it would run."""
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None or version < 90000:
        return f"it needs cuDNN 9 or newer, got {version}"
    batch, _, heads, size = q_BShD.shape
    if max(batch, heads) > 65535:
        return f"it takes at most 65535 rows and heads, got {batch} and {heads}"
    if size % 8 or value_size % 8:
        return f"head sizes must be multiples of 8, got {size} and {value_size}"
    if max(size, value_size) <= 128:
        return None
    # Hopper and datacenter Blackwell also do the one uneven pair of multi-head latent attention.
    wide = torch.cuda.get_device_capability(q_BShD.device) in ((9, 0), (10, 0), (10, 3)) and version >= 91100
    if wide and (size, value_size) == (192, 128):
        return None
    return f"head sizes go up to 128 (on capability 9.0 and 10.x also 192 with values of 128), got {size}, {value_size}"
