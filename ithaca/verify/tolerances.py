"""Limits of `ithaca verify` on the difference between sharded and whole: one table, each number with its reason.

The error of a gradient is relative to its largest entry, and to `FLOOR` of the largest entry of all gradients at least:
a gradient that is zero but for rounding (of a key's bias, for instance) has no scale of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

FLOOR = 1e-4


@dataclass(frozen=True, slots=True)
class ParityLimits:
    """The largest errors that count as rounding. `steps`: of a loss after optimizer steps.

    `saved`: of logits after loading. `isolation`: of logits of a document when another document changes.
    """

    loss: float
    logits: float
    gradients: float
    steps: float
    saved: float
    isolation: float


# Sums in another order differ by 1e-16 to 1e-13; a wrong position, head or divisor by 1e-6 and more.
# `saved`: weights are compared bit for bit, but buffers that no file holds (rotary frequencies, scales) are computed in
# fp32 in a model that is converted to fp64, and in fp64 in a model that is loaded in fp64.
FP64 = ParityLimits(loss=1e-10, logits=1e-10, gradients=1e-10, steps=1e-9, saved=1e-6, isolation=0.0)

# Rounding of 6e-8 in each of a few hundred sums of thousands of products, one after the other; AdamW divides by the
# root of a gradient's square, which turns rounding of gradients near zero into steps.
FP32 = ParityLimits(loss=1e-5, logits=1e-4, gradients=1e-3, steps=1e-4, saved=1e-6, isolation=0.0)

# A changed token may go to other experts, and products over another number of tokens are summed in another order.
EXPERTS_FP64 = 1e-12
EXPERTS_FP32 = 1e-5

# bf16 keeps 8 bits, and errors of single runs scatter: the sharded model may be further from fp32 than one device's own
# bf16 by this factor.
BF16_FACTOR = 1.5
# A mean over tokens whose logits are rounded to 8 bits.
BF16_LOSS = 1e-2

# A rank saves 1 / sp of what one process saves for backward. This factor allows for uneven heads, copies of key-value
# heads, padding, and the few tensors that belong to no token.
SAVED_FACTOR = 1.5


def limits_for(dtype: torch.dtype, *, experts: bool) -> ParityLimits:
    """Return the limits of a model in `dtype`, with or without experts."""
    exact = dtype == torch.float64
    plain = FP64 if exact else FP32
    return replace(plain, isolation=EXPERTS_FP64 if exact else EXPERTS_FP32) if experts else plain
