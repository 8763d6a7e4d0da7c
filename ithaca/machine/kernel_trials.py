"""Trials of the attention kernels on this machine, beside the same attention in fp32.

    try_kernel(KERNELS["cudnn"], torch.device("cuda"))
    KernelTrial("right", "within 3.0e-03 of fp32: head size 128")

Each kernel runs forward and backward at the edges of its guards: the largest head sizes that it takes, and documents of
one token and of a block's borders. A kernel that gives wrong gradients on some card or version gives them here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ithaca.attention.kernels import QKV, AttentionSpec, DocumentOffsets, Kernel
from ithaca.attention.kernels.blockwise import BlockwiseKernel

# Few tokens, no multiple of a block, and the head size that most models have.
TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 259, 4, 2, 128
# The shortest document there is, and the borders of a block.
DOCUMENTS = (1, 127, 1, 128, 2)
# bf16 rounds each gradient to 3e-3 of its size, and fp32 far less; a kernel that is wrong is wrong by its own size.
MOST_ERROR = 0.02
_SPEC = AttentionSpec(HEAD_SIZE**-0.5)
_FP32 = BlockwiseKernel()


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """Result of a kernel's trials: "missing" if it cannot run here; `said`: why, or how close it is."""

    state: Literal["right", "wrong", "missing"]
    said: str


def try_kernel(kernel: Kernel, device: torch.device) -> KernelTrial:
    """Run a kernel forward and backward at the usual head size and at its largest, and over documents if it takes them."""
    worst = 0.0
    tried: list[str] = []
    for what, trial in _trials(kernel, device):
        refused = kernel.why_not(trial.q, trial.v, _SPEC)
        if refused is not None and not tried:
            return KernelTrial("missing", refused)
        if refused is not None:
            continue
        try:
            off = _error(kernel, trial)
        except Exception as error:
            return KernelTrial("wrong", f"{what}: {type(error).__name__}: {error}".splitlines()[0][:200])
        if not off <= MOST_ERROR:
            return KernelTrial("wrong", f"{what}: off from fp32 by {off:.2g} of the size")
        worst = max(worst, off)
        tried.append(what)
    return KernelTrial("right", f"within {worst:.1e} of fp32: {', '.join(tried)}")


def _trials(kernel: Kernel, device: torch.device) -> Iterator[tuple[str, QKV]]:
    draw = torch.Generator(device).manual_seed(0)
    # The GPU kernels take no fp32.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def drawn(size: int, value_size: int) -> QKV:
        # Grouped-query attention, as most models have it.
        heads = (HEADS, size), (KV_HEADS, size), (KV_HEADS, value_size)
        q, k, v = (torch.randn(1, TOKENS, h, d, device=device, dtype=dtype, generator=draw) for h, d in heads)
        return QKV(q, k, v)

    yield f"head size {HEAD_SIZE}", drawn(HEAD_SIZE, HEAD_SIZE)
    if kernel.largest_sizes != (HEAD_SIZE, HEAD_SIZE):
        yield (
            "head size " + "/".join(str(size) for size in dict.fromkeys(kernel.largest_sizes)),
            drawn(*kernel.largest_sizes),
        )
    if kernel.varlen:
        offsets = torch.tensor([0, *DOCUMENTS], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        yield "documents", replace(drawn(HEAD_SIZE, HEAD_SIZE), bounds=DocumentOffsets(offsets, max(DOCUMENTS)))


def _error(kernel: Kernel, trial: QKV) -> float:
    """Return the largest relative error of a kernel's output and gradients, from the same documents in fp32 one by one."""
    dout = torch.randn(trial.q.shape[:-1] + trial.v.shape[-1:], device=trial.q.device).to(trial.q.dtype)
    exact: list[list[torch.Tensor]] = [[], [], [], []]
    for piece in torch.arange(TOKENS).split(list(DOCUMENTS) if trial.bounds else [TOKENS]):
        span = slice(int(piece[0]), int(piece[-1]) + 1)
        q, k, v, d = (x[:, span].float() for x in (*trial.tensors, dout))
        out, lse = _FP32.forward(QKV(q, k, v), _SPEC)
        for parts, part in zip(exact, (out, *_FP32.backward(d, QKV(q, k, v), out, lse, _SPEC)), strict=True):
            parts.append(part)
    if trial.bounds is not None:
        trial, dout = replace(trial, q=trial.q[0], k=trial.k[0], v=trial.v[0]), dout[0]
    out, lse = kernel.forward(trial, _SPEC)
    got = (out, *kernel.backward(dout, trial, out, lse, _SPEC))
    pairs = zip(got, (torch.cat(parts, 1) for parts in exact), strict=True)
    # torch's maximum of numbers and NaN is NaN; Python's depends on their order.
    return float(torch.stack([(x.float().reshape(y.shape) - y).norm() / y.norm() for x, y in pairs]).max())
