"""The cost that plans are ordered by: FLOPs of recomputation, and the time of host copies that compute does not hide.

Host copies are priced in the FLOPs that the device could have done meanwhile. A layer's copy is free while the layer's
attention takes longer than the copy.
"""

from __future__ import annotations

from ithaca.planning.memory_plan import Job, LayerMode, MemoryPlan
from ithaca.planning.model.flops import attention_flops, token_flops
from ithaca.planning.model.layer_parameters import LayerSizes
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.activations import TensorBytes, saved

# An H200 does about 550 TFLOP/s of attention and copies 55 GB/s each way; an A100's ratio is much the same.
FLOPS_PER_COPIED_BYTE = 10_000
# Device memory is about 70 times as fast as a copy to the host.
FLOPS_PER_TOUCHED_BYTE = 140
# Bytes touched for each weight and tile: the tile's gradient is read, the fp32 sum read and written.
SUMMED_BYTES = 2 + 4 + 4


def recompute_flops(sizes: ModelSizes, job: Job, layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> int:
    """Return the FLOPs of a layer's forward that its backward repeats under `mode`."""
    left_out = 2 * last_product(layer, job) * job.tokens
    if mode == "keep":
        return 2 * layer.active * job.tokens - left_out if tiled else 0
    attention = attention_flops(sizes, layer, job) if mode == "recompute" else 0
    return (2 if mode == "rebuild" else 1) * token_flops(layer, job) + attention - left_out


def last_product(layer: LayerSizes, job: Job) -> int:
    """Return the MLP parameters whose product is not repeated: compiled code leaves out a product that no gradient needs."""
    return layer.last if job.fused else 0


def tile_cost(sizes: ModelSizes, job: Job, mlp_tile: int) -> int:
    """Return the cost of summing weight gradients over tiles."""
    tiles = -(-job.tokens // mlp_tile)
    if tiles == 1 or sizes.adapters:
        return 0
    return tiles * sum(layer.mlp for layer in sizes.layers) * SUMMED_BYTES * FLOPS_PER_TOUCHED_BYTE


def recompute_cost(sizes: ModelSizes, job: Job, plan: MemoryPlan) -> int:
    """Return the FLOPs that one rank recomputes in a step."""
    tiled = plan.mlp_tile < job.tokens
    pairs = zip(sizes.layers, plan.layers, strict=True)
    return sum(recompute_flops(sizes, job, layer, mode, tiled=tiled) for layer, mode in pairs)


def copy_cost(sizes: ModelSizes, job: Job, plan: MemoryPlan) -> int:
    """Return the cost of host copies that outlast the attention of their layer."""
    tensors = TensorBytes.of(sizes, job, plan.head_groups)
    shown = 0
    for layer, mode, offloaded in zip(sizes.layers, plan.layers, plan.offload, strict=True):
        if offloaded:
            moved = sum(saved(tensors, layer, mode, tiled=plan.mlp_tile < job.tokens))
            shown += max(0, moved * FLOPS_PER_COPIED_BYTE - attention_flops(sizes, layer, job))
    return shown


def optimizer_bytes(job: Job) -> float:
    """Return the bytes of optimizer state for one parameter: two moments, in the optimizer's own precision."""
    # In 8 bits every 256 values share an fp32 scale.
    each = {"adamw": 2.0 * job.gradient_bytes, "adamw8bit": 2 * (1 + 4 / 256), "bf16_sr": 4.0, "none": 0.0}
    return each[job.optimizer]
