"""Token losses as `(sum, count)`: the one division, by the global count, happens in `training/step.py`.

A shard on which nothing is learned gives a sum of zero that still has a graph, so its backward runs the same
collectives as every other rank's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the targets that are not -100, in fp32 (fp64 stays fp64), and their number."""
    exact = torch.promote_types(logits_BLV.dtype, torch.float32)
    total = F.cross_entropy(
        logits_BLV.flatten(0, 1).to(exact), targets_BL.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (targets_BL != -100).sum()
