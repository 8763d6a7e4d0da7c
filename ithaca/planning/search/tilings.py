"""Sizes of the tiles and the number of head groups: as large as the memory they take stays small, or as small as can be."""

from __future__ import annotations

from typing import NamedTuple

from ithaca.planning.memory_plan import Decided, Job
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.activations import TensorBytes, group_bytes

# A head group's buffers and workspace take at most this share of the device.
GROUP_SHARE = 0.05
# No kernel tensor reaches this many elements.
INDEX_LIMIT = 2**31
MLP_TILE_BYTES = 512 * 2**20
LOSS_TILE_BYTES = 2**31
SMALLEST_MLP_TILE, SMALLEST_LOSS_TILE = 2048, 256


class Tiling(NamedTuple):
    """Sizes of what is computed at once, in the order in which a `MemoryModel` takes them."""

    mlp_tile: int
    loss_tile: int
    head_groups: int


def mlp_tile_for(sizes: ModelSizes, job: Job) -> int:
    """Return the tokens of an MLP tile: about 512 MiB of activations, both ways; a power of two from 2048 on."""
    return _power_of_two(MLP_TILE_BYTES // (2 * sizes.widest * job.compute_bytes), SMALLEST_MLP_TILE, job.tokens)


def loss_tile_for(sizes: ModelSizes, job: Job) -> int:
    """Return the tokens of a loss tile: at most about 2 GiB of logits and their gradient."""
    if job.whole_logits:
        return job.tokens
    # Uncompiled, four fp32 values and a mark of each logit live at once.
    each = 2 * job.compute_bytes + (0 if job.fused else 17)
    return _power_of_two(LOSS_TILE_BYTES // (each * sizes.vocabulary), SMALLEST_LOSS_TILE, job.tokens)


def head_groups_for(sizes: ModelSizes, job: Job, device: int) -> int:
    """Return the fewest groups whose buffers keep to their share and whose tensors can be indexed in 31 bits."""
    # Numbers of groups whose largest is as large differ in nothing but calls: the smallest of them will do.
    split = sizes.split(job.sp)
    numbers = {-(-split.most[1] // groups): groups for groups in range(split.most_groups, 0, -1)}
    every = [TensorBytes.of(sizes, job, groups) for groups in sorted(numbers.values())]
    small = [tensors for tensors in every if tensors.largest_g < INDEX_LIMIT] or every[-1:]
    modest = (tensors for tensors in small if group_bytes(tensors) <= GROUP_SHARE * device)
    return next(modest, min(small, key=group_bytes)).groups


def _power_of_two(tokens: int, least: int, whole: int) -> int:
    power = 1 << max(tokens, 1).bit_length() - 1
    return min(max(power, least), whole)


def usual_tiling(sizes: ModelSizes, job: Job, device: int, decided: Decided) -> Tiling:
    """Return the sizes to begin with, but for those that are decided."""
    return Tiling(
        decided.mlp_tile or mlp_tile_for(sizes, job),
        decided.loss_tile or loss_tile_for(sizes, job),
        decided.head_groups or head_groups_for(sizes, job, device),
    )


def smallest_tiling(sizes: ModelSizes, job: Job, decided: Decided) -> Tiling:
    """Return the sizes that take the least memory, but for those that are decided."""
    return Tiling(
        decided.mlp_tile or min(SMALLEST_MLP_TILE, job.tokens),
        decided.loss_tile or (job.tokens if job.whole_logits else min(SMALLEST_LOSS_TILE, job.tokens)),
        decided.head_groups or head_groups_for(sizes, job, 0),
    )


def mlp_tiles(usual: int, whole: int) -> tuple[int, ...]:
    """Return the usual tile, four times that and so on, and the whole shard."""
    tiles = []
    while usual < whole:
        tiles.append(usual)
        usual *= 4
    return (*tiles, whole)
