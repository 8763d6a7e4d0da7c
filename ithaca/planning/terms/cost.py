"""What a plan costs beyond the work that no plan saves: floating-point work done again, and copies that show.

One number orders plans: FLOPs of one rank and step. Copies to the host are priced in the FLOPs that could have run
meanwhile, and are free as long as the attention of a layer takes longer than its own tensors' way out.
"""

from __future__ import annotations

from ithaca.planning.memory_plan import Job, LayerMode, MemoryPlan
from ithaca.planning.model.flops import attention_flops, token_flops
from ithaca.planning.model.layer_parameters import LayerSizes
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.activations import TensorBytes, saved

# An H200 does about 550 TFLOP/s of attention and copies 55 GB/s each way; an A100's ratio is much the same.
FLOPS_PER_COPIED_BYTE = 10_000
# Device memory is about 70 times as fast as that.
FLOPS_PER_TOUCHED_BYTE = 140
# A tile's weight gradient is read, and so is the fp32 sum, which is written again.
SUMMED_BYTES = 2 + 4 + 4


def run_again(sizes: ModelSizes, job: Job, layer: LayerSizes, mode: LayerMode, *, tiled: bool) -> int:
    """FLOPs of forward work that backward does once more under `mode`."""
    left_out = 2 * last_product(layer, job) * job.tokens
    if mode == "keep":
        return 2 * layer.active * job.tokens - left_out if tiled else 0
    attention = attention_flops(sizes, layer, job) if mode == "recompute" else 0
    return (2 if mode == "rebuild" else 1) * token_flops(layer, job) + attention - left_out


def last_product(layer: LayerSizes, job: Job) -> int:
    """MLP parameters that are not multiplied by once more: compiled, a product that no gradient needs is left out."""
    return layer.last if job.fused else 0


def tile_cost(sizes: ModelSizes, job: Job, mlp_tile: int) -> int:
    """What summing weight gradients over tiles costs."""
    tiles = -(-job.tokens // mlp_tile)
    if tiles == 1 or sizes.adapters:
        return 0
    return tiles * sum(layer.mlp for layer in sizes.layers) * SUMMED_BYTES * FLOPS_PER_TOUCHED_BYTE


def recompute_cost(sizes: ModelSizes, job: Job, plan: MemoryPlan) -> int:
    """FLOPs that one rank does again in a step."""
    tiled = plan.mlp_tile < job.tokens
    pairs = zip(sizes.layers, plan.layers, strict=True)
    return sum(run_again(sizes, job, layer, mode, tiled=tiled) for layer, mode in pairs)


def copy_cost(sizes: ModelSizes, job: Job, plan: MemoryPlan) -> int:
    """What the copies of offloaded layers cost where they outlast the attention they run beside."""
    tensors = TensorBytes.of(sizes, job, plan.head_groups)
    shown = 0
    for layer, mode, away in zip(sizes.layers, plan.layers, plan.offload, strict=True):
        if away:
            moved = sum(saved(tensors, layer, mode, tiled=plan.mlp_tile < job.tokens))
            shown += max(0, moved * FLOPS_PER_COPIED_BYTE - attention_flops(sizes, layer, job))
    return shown
