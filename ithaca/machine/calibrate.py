"""Timing of this machine's kernels and copies for `ithaca plan --calibrate`, in the units of the table of cards.

Each figure is the mean over repeats that fill a window of time, so that the GPU runs at its sustained clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ithaca.attention.kernels import QKV, AttentionSpec, choose
from ithaca.constants import GIB
from ithaca.errors import UnsupportedError
from ithaca.planning.machine.calibrated import Measured
from ithaca.planning.machine.hardware import AttentionSpeed
from ithaca.planning.model.flops import ATTENTION_BACKWARD


@dataclass(frozen=True, slots=True)
class TrialSizes:
    """Sizes of the trials: (head size, length) of attention; tokens, inputs, outputs of a product; bytes of a copy."""

    attention: tuple[tuple[int, int], ...] = ((64, 32_768), (64, 131_072), (128, 32_768), (128, 131_072))
    heads: tuple[int, int] = (8, 2)
    product: tuple[int, int, int] = (16_384, 4096, 14_336)
    copied: int = GIB
    window: float = 0.5


def this_card() -> Measured:
    """Measure this machine's GPU."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "there is no GPU here to calibrate: run `ithaca plan --calibrate` on the machine it is for"
        )
    return measure(torch.device("cuda", torch.cuda.current_device()), TrialSizes())


def measure(device: torch.device, sizes: TrialSizes) -> Measured:
    """Return the figures of `device`, from trials of `sizes`."""
    gpu = device.type == "cuda"
    return Measured(
        name=torch.cuda.get_device_name(device) if gpu else "CPU",
        memory=torch.cuda.mem_get_info(device)[1] if gpu else 0,
        matmul=_matmul(device, sizes) / 1e12,
        attention=tuple(_attention(device, sizes, size, length) for size, length in sizes.attention),
        bandwidth=_bandwidth(device, sizes) / 1e9,
        host_copy=_host_copy(device, sizes) / 1e9,
        torch=torch.__version__,
    )


def _attention(device: torch.device, sizes: TrialSizes, size: int, length: int) -> AttentionSpeed:
    heads, kv_heads = sizes.heads
    q, k, v, dout = (_random(device, 1, length, n, size) for n in (heads, kv_heads, kv_heads, heads))
    spec = AttentionSpec(size**-0.5)
    kernel = choose("auto", q, v, spec)
    qkv = QKV(q, k, v)
    out, lse = kernel.forward(qkv, spec)
    # Two products of 2 * length^2 * size a head, half of them masked.
    flops = 2.0 * length**2 * heads * size
    forward = _seconds(partial(kernel.forward, qkv, spec), device, sizes.window)
    backward = _seconds(partial(kernel.backward, dout, qkv, out, lse, spec), device, sizes.window)
    return AttentionSpeed(size, length, flops / forward / 1e12, ATTENTION_BACKWARD * flops / backward / 1e12)


def _matmul(device: torch.device, sizes: TrialSizes) -> float:
    """Return the FLOP/s of an MLP's matrix product."""
    tokens, inputs, outputs = sizes.product
    x, weight = _random(device, tokens, inputs), _random(device, inputs, outputs)
    return 2.0 * tokens * inputs * outputs / _seconds(partial(torch.matmul, x, weight), device, sizes.window)


def _bandwidth(device: torch.device, sizes: TrialSizes) -> float:
    """Return the bytes per second that a copy within the device reads and writes."""
    # Every byte is read once and written once.
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * sizes.copied / _seconds(partial(target.copy_, source), device, sizes.window)


def _host_copy(device: torch.device, sizes: TrialSizes) -> float:
    """Return the bytes per second of a copy from or to pinned memory, whichever is slower."""
    on_device = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    on_host = torch.empty(sizes.copied, dtype=torch.uint8, pin_memory=device.type == "cuda")
    slower = max(
        _seconds(partial(target.copy_, source, non_blocking=True), device, sizes.window)
        for target, source in ((on_device, on_host), (on_host, on_device))
    )
    return sizes.copied / slower


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _seconds(call: Callable[[], object], device: torch.device, window: float) -> float:
    """Return the mean time of a call over repeats that fill `window` seconds, after a warm-up call."""
    # The first call compiles, or fills caches and the allocator.
    call()
    once = _timed(call, 1, device)
    return _timed(call, max(1, min(200, int(window / max(once, 1e-6)))), device)


def _timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    _synchronize(device)
    return (time.perf_counter() - started) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
