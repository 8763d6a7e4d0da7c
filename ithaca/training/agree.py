"""One small gather before a step: every rank says what it is about to run, and all raise or none.

Without it a bad batch on one rank leaves the others waiting in an all-to-all, and ranks of one sequence group that
were handed different rows train on a mixture without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.errors import BatchError, PeerError
from ithaca.mesh import Mesh
from ithaca.sequence.batch import Shard

_FAILED = -1


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks together are about to run."""

    count: int


def agree(mesh: Mesh, batch: Mapping[str, Any], shard: Shard | None, error: Exception | None) -> Agreement:
    """Compare notes with every rank. `error` is what this rank found wrong with its batch, if anything."""
    mine = torch.tensor(_note(batch, shard), dtype=torch.int64, device=mesh.device)
    notes = mine.new_empty(mesh.world * mine.numel())
    dist.all_gather_into_tensor(notes, mine, group=mesh.world_group)
    table = notes.view(mesh.world, -1).tolist()
    if error is not None:
        raise error
    failed = [rank for rank, note in enumerate(table) if note[0] == _FAILED]
    if failed:
        raise PeerError(f"rank {failed[0]} refused its batch and says why; this rank's was fine, all ranks stop alike")
    groups = [table[start : start + mesh.shards] for start in range(0, mesh.world, mesh.shards)]
    for group, notes_of_group in enumerate(groups):
        _same(notes_of_group, group * mesh.shards)
    return Agreement(count=sum(group[0][2] for group in groups))


def _note(batch: Mapping[str, Any], shard: Shard | None) -> list[int]:
    if shard is None:
        return [_FAILED, 0, 0, 0]
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    return [shard.layout.batch, shard.layout.length, shard.count, _fingerprint(tokens)]


def _fingerprint(tokens: Tensor) -> int:
    """A position-weighted sum: enough to tell two rows apart, one pass over the ids."""
    flat = (tokens if tokens.dim() == 2 else tokens[..., 0]).flatten().to(torch.float64)
    weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64) % 8191
    return int((flat * weights).sum().item()) % (1 << 62)


def _same(notes: list[list[int]], first_rank: int) -> None:
    for offset, note in enumerate(notes):
        for what, mine, other in zip(("rows", "tokens a row", "targets", "tokens' content"), notes[0], note, strict=True):
            if mine != other:
                raise BatchError(
                    f"ranks {first_rank} and {first_rank + offset} share one sequence but were handed different batches "
                    f"({what}: {mine} and {other}): give every rank of a sequence group the same rows, by mesh.dp_rank"
                )
