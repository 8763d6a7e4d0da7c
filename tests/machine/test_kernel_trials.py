"""Tests of the kernels' trials: each way in which a kernel may be wrong is seen, and what it refuses is no fault."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.attention.kernels import KERNELS, QKV, AttentionSpec
from ithaca.attention.kernels.cpu import CpuKernel
from ithaca.machine.kernel_trials import try_kernel

CPU = torch.device("cpu")


class Packed(CpuKernel):
    """The CPU's kernel with a varlen form, document by document."""

    varlen = True

    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        if qkv.bounds is None:
            return super().forward(qkv, spec)
        found = [super(Packed, self).forward(each, spec) for each in self.pieces(qkv)]
        return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], -1)

    def backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Any:
        if qkv.bounds is None:
            return super().backward(dout, qkv, out, lse, spec)
        ends = qkv.bounds.offsets.tolist()
        found = []
        for each, (start, end) in zip(self.pieces(qkv), pairwise(ends), strict=True):
            span = slice(start, end)
            found.append(super().backward(dout[None, span], each, out[None, span], lse[None, :, span], spec))
        return tuple(torch.cat([part[i][0] for part in found]) for i in range(3))

    def pieces(self, qkv: QKV) -> list[QKV]:
        assert qkv.bounds is not None
        ends = qkv.bounds.offsets.tolist()
        return [QKV(*(x[None, a:b] for x in qkv.tensors)) for a, b in pairwise(ends)]


class Nan(CpuKernel):
    def forward(self, qkv: QKV, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(qkv, spec)
        return out * torch.nan, lse


class NanInItsLastGradient(CpuKernel):
    def backward(self, *given: Any) -> Any:
        dq, dk, dv = super().backward(*given)
        return dq, dk, dv * torch.nan


class WrongGradient(CpuKernel):
    def backward(self, *given: Any) -> Any:
        dq, dk, dv = super().backward(*given)
        return dq, dk * 1.05, dv


class WrongAtItsLargestSize(WrongGradient):
    def backward(self, *given: Any) -> Any:
        return (super() if given[1].q.shape[-1] == 256 else super(WrongGradient, self)).backward(*given)


class Leaking(Packed):
    """Takes documents for one row."""

    def pieces(self, qkv: QKV) -> list[QKV]:
        return [QKV(*(x[None] for x in qkv.tensors))]

    def backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Any:
        grads = CpuKernel.backward(self, dout[None], self.pieces(qkv)[0], out[None], lse[None], spec)
        return tuple(x[0] for x in grads)


class LeakingInVarlen(Leaking):
    def backward(self, dout: Tensor, qkv: QKV, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Any:
        return (CpuKernel if qkv.bounds is None else Leaking).backward(self, dout, qkv, out, lse, spec)


class Raising(CpuKernel):
    def backward(self, *_: Any) -> Any:
        raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("kernel", "state", "said"),
    [
        (CpuKernel(), "right", "of fp32: head size 128, head size 256"),
        (Packed(), "right", "of fp32: head size 128, head size 256, documents"),
        (Nan(), "wrong", "head size 128: off from fp32 by nan"),
        (NanInItsLastGradient(), "wrong", "head size 128: off from fp32 by nan"),
        (WrongGradient(), "wrong", "head size 128: off from fp32 by 0.05"),
        (WrongAtItsLargestSize(), "wrong", "head size 256: off from fp32 by 0.05"),
        (LeakingInVarlen(), "wrong", "documents: off from fp32 by "),
        (Raising(), "wrong", "head size 128: RuntimeError: no such instruction"),
        (KERNELS["cudnn"], "missing", "it needs an NVIDIA GPU"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_trials_say_right_wrong_or_missing(kernel: Any, state: str, said: str) -> None:
    found = try_kernel(kernel, CPU)
    assert found.state == state
    assert said in found.said
