"""How far sharded and whole may lie apart: the one table of `ithaca verify`, each number with its reason.

Errors of gradients are relative to the largest entry of the same gradient, but never to less than `FLOOR` of the
largest of all: what is zero but for rounding (a key's bias, for instance) has no scale of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

FLOOR = 1e-4


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest error that counts as rounding. `steps`: of a loss after optimizer steps.

    `saved`: of logits after loading. `isolation`: of logits of a document when another one changes.
    """

    loss: float
    logits: float
    gradients: float
    steps: float
    saved: float
    isolation: float


# `saved`: buffers that no file holds (rotary frequencies, scales) are computed in fp32 in a model that is widened to
# fp64, and in fp64 in one that is loaded so; weights are compared bit for bit.
# Sums in another order differ by 1e-16 to 1e-13; a wrong position, head or divisor by 1e-6 and more.
FP64 = Limits(loss=1e-10, logits=1e-10, gradients=1e-9, steps=1e-9, saved=1e-6, isolation=0.0)

# Rounding of 6e-8 in each of a few hundred sums of thousands of products, one after the other; AdamW divides by the
# root of a gradient's square, which turns rounding of gradients near zero into steps.
FP32 = Limits(loss=1e-5, logits=1e-4, gradients=1e-3, steps=1e-4, saved=1e-6, isolation=0.0)

# A changed token may go to other experts, and products over another number of tokens are summed in another order.
EXPERTS_FP64 = 1e-12
EXPERTS_FP32 = 1e-5

# bf16 keeps 8 bits, and errors of single runs scatter: sharded may be off by this times what one device is off by.
BF16_FACTOR = 1.5
# A mean over tokens whose logits are rounded to 8 bits.
BF16_LOSS = 1e-2

# Of what one process keeps for backward: a rank's share is 1 / sp; uneven heads, copies of key-value heads, padding
# and the few tensors that are no token's come on top.
SHARE = 1.5


def limits_for(dtype: torch.dtype, *, experts: bool) -> Limits:
    """The row of the table for a model in `dtype`."""
    exact = dtype == torch.float64
    plain = FP64 if exact else FP32
    if not experts:
        return plain
    return replace(plain, isolation=EXPERTS_FP64 if exact else EXPERTS_FP32)
