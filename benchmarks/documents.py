"""Packed rows for the benchmarks: documents of one length, or of lengths that vary as those of real text do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The median length, and the standard deviation of its logarithm.
LOG_NORMAL = (2048, 1.4)


def positions(documents: str, length: int) -> Tensor:
    """Return the position ids of a packed row: documents of so many tokens, or of lengths from a log-normal law."""
    if documents.isdigit():
        lengths = torch.full((-(-length // int(documents)),), int(documents))
    else:
        median, deviation = LOG_NORMAL
        drawn = torch.randn(length, generator=torch.Generator().manual_seed(2)) * deviation + math.log(median)
        lengths = drawn.exp().ceil().long()
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)[:length]
    return (torch.arange(length) - starts)[None]
