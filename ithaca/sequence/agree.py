"""Agreement of all ranks on a step: one small all-reduce before the forward pass, after which all ranks raise or none.

Each rank fills its row of a table and the sum gives every rank the whole table. Four ranks, sp=2, one micro-batch:

    rank   rows  tokens  targets  ids   labels  documents  embeddings | count  ...  trained weights
    0      1     8192    8191     71..  88..    12..       0          | 33..   ...  40..     same sequence group:
    1      1     8192    8191     71..  88..    12..       0          | 33..   ...  40..     these two rows must be equal
    2      1     4096    4095     55..  61..    90..       0          | 33..   ...  40..
    3      -1    ...                                                                      failed: all ranks raise

Without the agreement a bad batch on one rank would leave the others waiting in an all-to-all, and ranks of one sequence
group with different rows would train on a mixture. Ranks that divide their loss by different counts would sum to no
mean, and ranks that freeze different weights would wait for each other's gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.errors import BatchError, PeerError, UnsupportedError
from ithaca.mesh import Mesh
from ithaca.sequence.batch import Shard

_FAILED = -1
_COLUMNS = (
    "rows",
    "tokens a row",
    "targets",
    "tokens' content",
    "labels' content",
    "documents and positions",
    "embeddings that need a gradient",
)
_TARGETS = _COLUMNS.index("targets")
_CONTENTS = (
    ("input_ids", "inputs_embeds"),
    ("labels", "shift_labels"),
    (
        "position_ids",
        "attention_mask",
        "document_ids",
        "seq_idx",
        "cu_seqlens",
        "cu_seq_lens_q",
        "output_router_logits",
    ),
)


@dataclass(frozen=True, slots=True)
class CutBatch:
    """Batch with this rank's shard, or with the exception of the sharding, which is raised after the agreement."""

    batch: Mapping[str, Any]
    shard: Shard | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, batch: Mapping[str, Any], cut: Callable[[Mapping[str, Any]], Shard]) -> CutBatch:
        """Return `cut(batch)`, or the exception that it raised."""
        try:
            return cls(batch, cut(batch))
        except Exception as error:
            return cls(batch, error=error)


def agree(
    mesh: Mesh, cuts: Sequence[CutBatch], model: nn.Module, options: Mapping[str, float | None] | None = None
) -> list[int]:
    """Compare the ranks' micro-batches, and raise on all ranks or none; return each one's targets over all ranks.

    Every rank passes the same number of cuts, one for each micro-batch. `options`: numbers that the loss depends on,
    such as the count of targets to divide by, which must be equal on all ranks. The all-reduce runs over the host
    group, so that no device waits for it.
    """
    failure = next((cut.error for cut in cuts if cut.error is not None), None)
    if mesh.world == 1:
        if failure is not None:
            raise failure
        return [cut.shard.count for cut in cuts if cut.shard is not None]
    options = options or {}
    mine = [number for cut in cuts for number in _note(cut)]
    # A refused option may be no number, and a refused model no model.
    mine += [0] * (len(options) + 1) if failure else [*map(_checksum, options.values()), _trained(model)]
    table = gather_rows(mesh, mine)
    if failure is not None:
        raise failure
    width = len(_COLUMNS)
    notes = [[row[at * width : (at + 1) * width] for at in range(len(cuts))] for row in table]
    failed = [rank for rank, of_rank in enumerate(notes) if any(note[0] == _FAILED for note in of_rank)]
    if failed:
        raise PeerError(f"rank {failed[0]} refused its batch or options and says why; this rank's were fine, all stop")
    counts = []
    for at in range(len(cuts)):
        firsts = range(0, mesh.world, mesh.shards)
        for first in firsts:
            _refuse_other_rows([notes[rank][at] for rank in range(first, first + mesh.shards)], first)
        counts.append(sum(notes[first][at][_TARGETS] for first in firsts))
    _refuse_other_options([row[-1 - len(options) : -1] for row in table], options)
    _refuse_other_weights([row[-1] for row in table])
    return counts


def gather_rows(mesh: Mesh, mine: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, one row a rank; all ranks pass equally many."""
    rows = torch.zeros(mesh.world, len(mine), dtype=torch.int64)
    rows[mesh.rank] = torch.tensor(mine, dtype=torch.int64)
    # A sum of rows that are zero elsewhere is a gather; torch's gather functions change names between releases.
    dist.all_reduce(rows, group=mesh.host_group)
    table: list[list[int]] = rows.tolist()
    return table


def _note(cut: CutBatch) -> list[int]:
    if cut.shard is None or cut.error is not None:
        return [_FAILED] + [0] * (len(_COLUMNS) - 1)
    shard, layout = cut.shard, cut.shard.layout
    contents = (_fingerprint(cut.batch, keys) for keys in _CONTENTS)
    trained = any(isinstance(value, Tensor) and value.requires_grad for value in shard.inputs.values())
    return [layout.batch, layout.length, shard.count, *contents, int(trained)]


def _checksum(option: float | None) -> int:
    return zlib.crc32(repr(option if option is None else float(option)).encode())


def _trained(model: nn.Module) -> int:
    """Return a checksum of which weights are trained; 0 where no gradients are recorded."""
    if not torch.is_grad_enabled():
        return 0
    return 1 + zlib.crc32(bytes(parameter.requires_grad for parameter in model.parameters()))


def _refuse_other_options(of_ranks: list[list[int]], names: Iterable[str]) -> None:
    """Refuse loss options that differ between ranks: parts divided by different counts add up to no mean."""
    other = next((rank for rank, asked in enumerate(of_ranks) if asked != of_ranks[0]), None)
    if other is not None:
        each = zip(names, of_ranks[0], of_ranks[other], strict=True)
        raise BatchError(
            f"ranks 0 and {other} differ in {', '.join(name for name, mine, its in each if mine != its)}: pass the same on "
            "every rank; ithaca.count_tokens(batches, mesh) counts over all of them"
        )


def _refuse_other_weights(of_ranks: list[int]) -> None:
    """Refuse ranks that train different weights: all ranks reduce a gradient, and some would wait for ever."""
    other = next((rank for rank, trained in enumerate(of_ranks) if trained != of_ranks[0]), None)
    if other is None:
        return
    if of_ranks[0] and of_ranks[other]:
        raise UnsupportedError(f"ranks 0 and {other} train different weights: set the same requires_grad on every rank")
    raise UnsupportedError(
        f"rank {other if of_ranks[0] else 0} runs under torch.no_grad() and rank {0 if of_ranks[0] else other} does not: "
        "record gradients on all ranks, or on none"
    )


def _fingerprint(batch: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """Return a position-weighted sum of all entries' bits, a hash that one pass over the batch computes."""
    total = 0
    for number, key in enumerate(keys, 1):
        if batch.get(key) is None:
            continue
        values = torch.as_tensor(batch[key]).detach()
        # The first entry of every token's embedding is enough. Bits, because NaN has no integer value.
        flat = (values[..., 0] if key == "inputs_embeds" else values).flatten()
        bits = flat.double().view(torch.int64) if flat.is_floating_point() else flat.long()
        weights = torch.arange(1, bits.numel() + 1, device=bits.device) * 2_654_435_761
        total += number * int((bits * weights).sum().item())
    return total % (1 << 62)


def _refuse_other_rows(notes: list[list[int]], first_rank: int) -> None:
    for offset, note in enumerate(notes):
        for what, mine, other in zip(_COLUMNS, notes[0], note, strict=True):
            if mine != other:
                raise BatchError(
                    f"ranks {first_rank} and {first_rank + offset} share one sequence but were handed different batches "
                    f"({_differ(what, mine, other)}): give every rank of a sequence group the same rows, by mesh.dp_rank "
                    "(accelerator.process_index); a shuffled DataLoader takes a generator of one seed on all ranks"
                )


def _differ(what: str, mine: int, other: int) -> str:
    """Return the name of a column that differs between two ranks, with both values if they are counts."""
    return f"{what}: {mine} and {other}" if what in _COLUMNS[:3] else f"unlike in {what}"
