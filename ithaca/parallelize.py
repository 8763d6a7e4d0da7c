"""What happens to a model, in order: a newcomer's first file.

`parallelize` takes a Hugging Face causal language model (or a PEFT model around one) and gives the same object
back, ready for `causal_loss`. Everything that could be wrong is refused before the first collective.
"""

from __future__ import annotations

from typing import Literal, TypeVar, get_args

import torch
from torch import nn

from ithaca.attention.kernels import check_name
from ithaca.attention.ulysses import check_heads
from ithaca.errors import UnsupportedError
from ithaca.mesh import Mesh
from ithaca.models.auto import AutoMemory, job_of
from ithaca.models.binding import bind
from ithaca.models.experts import has_experts
from ithaca.models.layers import check_plan, install_memory
from ithaca.models.support import base_model, check_model, decoder_layers
from ithaca.planning.plan import MemoryPlan, Optimizer
from ithaca.state.weights import Weights, place_weights

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    mesh: Mesh,
    *,
    weights: Weights = "shard",
    kernel: str = "auto",
    memory: MemoryPlan | Literal["auto"] | None = "auto",
    memory_budget: int | None = None,
    optimizer: Optimizer = "adamw",
    fuse: bool | None = None,
    compute_dtype: torch.dtype | None = None,
    allow_untested: bool = False,
) -> M:
    """Make `model` run on shards of sequences over `mesh`, exactly; changes it in place and returns it.

    `weights`: "shard" (FSDP2 over all ranks), "replicate", or "none" (your own DDP, FSDP or DeepSpeed, which averages
    gradients over all ranks). `kernel`: "auto" or a name from `ithaca.KERNELS`. `memory`: how activations are kept,
    layer by layer: "auto" for the least recompute that fits `memory_budget` bytes (three quarters of the device) beside
    the state of `optimizer` ("adamw", "adamw8bit", "bf16_sr" or "none"), an `ithaca.MemoryPlan`, or None to leave it to
    autograd. `fuse`: torch.compile norms, activations, rotary embeddings and the loss (on GPUs, unless False;
    not with memory=None). `compute_dtype`: what FSDP2 casts weights to for computing, for example bf16 over fp32 weights.
    `allow_untested` lets an architecture through that no parity run has covered.
    """
    if weights not in get_args(Weights):
        raise UnsupportedError(f"weights={weights!r}: choose one of {', '.join(get_args(Weights))}")
    check_name(kernel)
    if not (memory is None or memory == "auto" or isinstance(memory, MemoryPlan)):
        raise UnsupportedError(f"memory={memory!r}: pass 'auto', None, or an ithaca.MemoryPlan")
    if optimizer not in get_args(Optimizer):
        raise UnsupportedError(f"optimizer={optimizer!r}: choose one of {', '.join(get_args(Optimizer))}")
    base = base_model(model)
    fuse = mesh.device.type == "cuda" if fuse is None else fuse

    # 1. Refuse by name what would not be exact.
    check_model(model, base, allow_untested=allow_untested)
    check_heads(*_heads(base), mesh)
    if isinstance(memory, MemoryPlan):
        check_plan(base, decoder_layers(base), memory)

    # 2. Attention: one exchange in, full attention on local heads, one exchange back. RoPE sees global lengths.
    binding = bind(base, mesh, kernel=kernel)

    # 3. Memory: token-wise work in tiles, layers run again from their anchors, saved tensors on the host.
    if memory is not None:
        model.to(mesh.device)
        job = job_of(model, mesh, weights, optimizer, fused=fuse, compute_dtype=compute_dtype)
        chosen = AutoMemory.of(model, base, mesh, job, memory_budget) if memory == "auto" else memory
        install_memory(binding, decoder_layers(base), chosen, fuse=fuse)

    # 4. Weights: FSDP2 over all ranks; gradients summed in fp32.
    place_weights(model, decoder_layers(base), mesh, weights, compute_dtype=compute_dtype, uneven=has_experts(base))
    return model


def _heads(base: nn.Module) -> tuple[int, int]:
    config = base.config.get_text_config()  # type: ignore[union-attr, operator]
    heads = int(config.num_attention_heads)
    return heads, int(getattr(config, "num_key_value_heads", None) or heads)
