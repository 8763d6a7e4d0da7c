"""Loss by position: how well a token is predicted, by how much of its document stands before it.

A model that does not use its context has the same loss in every bucket; one that fails beyond a length shows a rise
there. Buckets double: tokens 0-1,023, 1,024-2,047, 2,048-4,095 and so on. Sums and counts are this rank's until
they are taken, when all ranks' are added and counting starts anew.
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
        """Count one shard's token losses in."""
        # What is not learned is added as nothing: taking it out would make the host wait for the device.
        learned = (shard.targets.flatten() != IGNORE_INDEX).double()
        bucket = torch.bucketize(shard.inputs["position_ids"].flatten(), self._edges, right=True)
        self._table[0].index_add_(0, bucket, losses_BL.flatten().double() * learned)
        self._table[1].index_add_(0, bucket, learned)

    def take(self, mesh: Mesh) -> Tensor:
        """Sums and counts over all ranks since the last time, on the device: `[2, buckets]`."""
        total = self._table.clone()
        self._table.zero_()
        dist.all_reduce(total, group=mesh.world_group)
        return total

    def means_of(self, table: list[list[float]]) -> dict[str, float]:
        """The mean loss of every bucket that has tokens; named by the last position in it."""
        names = [f"<{edge}" for edge in self.edges] + [f">={self.edges[-1]}"]
        return {name: s / n for name, s, n in zip(names, *table, strict=True) if n}

    def means(self, mesh: Mesh) -> dict[str, float]:
        return self.means_of(self.take(mesh).tolist())
