"""`LossByPosition`: the mean loss of tokens by their position in the document, in doubling buckets.

    bucket      0-1,023    1,024-2,047    2,048-4,095    4,096-8,191    ...
    loss        2.9        2.6            2.5            3.4            the model fails beyond 4,096 tokens

A model that does not use its context has the same loss in every bucket. Sums and counts are this rank's until `take`,
which adds those of all ranks and starts anew.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.constants import IGNORE_INDEX
from ithaca.mesh import Mesh
from ithaca.sequence.batch import Shard

FIRST = 1024


class LossByPosition:
    """Sums of token losses in doubling buckets of position, for positions below `length`."""

    def __init__(self, length: int, device: torch.device) -> None:
        edges = [FIRST]
        while edges[-1] < length:
            edges.append(2 * edges[-1])
        self.edges = edges
        self._edges = torch.tensor(edges).to(device, non_blocking=True)
        # Row 0: sums, row 1: counts.
        self._table = torch.zeros(2, len(edges) + 1, dtype=torch.float64, device=device)

    def add(self, shard: Shard, losses_BL: Tensor) -> None:
        """Add one shard's token losses."""
        # Tokens that are not learned are added with weight 0: selecting the others would make the host wait for the device.
        learned = (shard.targets.flatten() != IGNORE_INDEX).double()
        bucket = torch.bucketize(shard.inputs["position_ids"].flatten(), self._edges, right=True)
        self._table[0].index_add_(0, bucket, losses_BL.flatten().double() * learned)
        self._table[1].index_add_(0, bucket, learned)

    def take(self, mesh: Mesh) -> Tensor:
        """Return sums and counts `[2, buckets]` over all ranks since the last call, on the device; start anew."""
        total = self._table.clone()
        self._table.zero_()
        dist.all_reduce(total, group=mesh.world_group)
        return total

    def means_of(self, table: list[list[float]]) -> dict[str, float]:
        """Return the mean loss of every bucket with tokens, named by the bucket's upper bound."""
        names = [f"<{edge}" for edge in self.edges] + [f">={self.edges[-1]}"]
        return {name: s / n for name, s, n in zip(names, *table, strict=True) if n}

    def means(self, mesh: Mesh) -> dict[str, float]:
        """Return the mean losses over all ranks, and start anew."""
        return self.means_of(self.take(mesh).tolist())
