"""What happens to a model, in order: a newcomer's first file.

`parallelize` takes a Hugging Face causal language model (or a PEFT model around one) and gives the same object
back, ready for `causal_loss`. Everything that could be wrong is refused before the first collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from ithaca.arguments import named_arguments, shown
from ithaca.attention.kernels import check_name
from ithaca.attention.ulysses import check_heads
from ithaca.errors import UnsupportedError
from ithaca.handle import Handle
from ithaca.mesh import Mesh, check_mesh
from ithaca.models.binding import bind
from ithaca.models.discover.findings import surveyed
from ithaca.models.discover.mixing import check_mixing
from ithaca.models.discover.passing import passing_of
from ithaca.models.discover.random_weights import randomized
from ithaca.models.experts import has_experts
from ithaca.models.layers.install import install_memory
from ithaca.models.placed import Placed
from ithaca.models.planner.plan_in_force import AutoMemory, job_of
from ithaca.models.refusals.memory_plans import plan_for
from ithaca.models.support import base_model, check_model, decoder_layers
from ithaca.planning.plan import Decided, MemoryPlan, Optimizer
from ithaca.quantities import no_truth, parse_bytes, with_unit
from ithaca.state.optimizer.made_before import Earlier
from ithaca.state.weights.guards import guard_weights
from ithaca.state.weights.placement import (
    OnHost,
    Weights,
    check_placement,
    leaves_device,
    move,
    place_weights,
    takes_groups,
)
from ithaca.state.weights.shardable import check_shardable

M = TypeVar("M", bound=nn.Module)
_COMPUTE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@named_arguments
def parallelize(
    model: M,
    mesh: Mesh,
    *,
    weights: Weights = "shard",
    replicas: int = 1,
    on_host: OnHost = "nothing",
    kernel: str = "auto",
    memory: MemoryPlan | Mapping[str, Any] | Literal["auto"] | None = "auto",
    memory_budget: float | str | None = None,
    host_budget: float | str | None = None,
    optimizer: Optimizer = "adamw",
    fuse: bool | None = None,
    compute_dtype: torch.dtype | None = None,
    allow_untested: bool = False,
) -> M:
    """Make `model` run on shards of sequences over `mesh`, exactly; changes it in place and returns it.

    `weights`: "shard" (FSDP2 over all ranks), "replicate", or "none" (your own DDP, FSDP or DeepSpeed, which averages
    gradients over all ranks). `replicas`: how many copies of sharded weights there are, each over neighbouring ranks.
    `on_host`: "everything" keeps weights, gradients and optimizer state in host memory. `kernel`: "auto" or a name from
    `ithaca.KERNELS`. `memory`: how activations are kept, layer by layer: "auto" for the least recompute that fits
    `memory_budget`, in bytes or as "40GB" (three quarters of the device), and a rank's `host_budget` (three quarters of
    its part of what is free there), beside the state of `optimizer` ("adamw", "adamw8bit", "bf16_sr" or "none"); a dict
    such as {"offload": False, "mlp_tile": 4096} for the same with that decided (`layers`, `offload`, `mlp_tile`,
    `loss_tile`, `head_groups`); a whole `ithaca.MemoryPlan`; or None to leave it to autograd. `fuse`: torch.compile norms,
    activations, rotary embeddings and the loss (on GPUs, unless False; not with memory=None). `compute_dtype`: what
    FSDP2 casts weights to for computing, for example bf16 over fp32 weights. `allow_untested` lets an architecture
    through that no parity run has covered.
    """
    check_mesh(mesh)
    check_placement(mesh, weights, replicas, on_host)
    check_name(kernel)
    check_settings(optimizer, compute_dtype, fuse=fuse, allow_untested=allow_untested)
    budget, host = read_budget("memory_budget", memory_budget), read_budget("host_budget", host_budget)
    base = base_model(model)
    fuse = mesh.device.type == "cuda" if fuse is None else fuse
    away, grouped = leaves_device(mesh, on_host), takes_groups(mesh, weights, on_host, compute_dtype)

    # 1. Refuse by name what would not be exact.
    check_model(model, base, allow_untested=allow_untested)
    layers = decoder_layers(base)
    earlier = Earlier.of(model)
    if grouped:
        check_shardable(model, layers)
        earlier.check_state()
    check_heads(*head_counts(base), mesh)
    given = plan_for(base, read_memory(memory), allow_untested=allow_untested)
    check_mixing(base, layers, mesh)
    if grouped:
        earlier.check_alike(mesh)

    # From here on the model is changed, and an error takes off again what is on its handle.
    handle = Handle.on(base, mesh)
    with handle.undone_on_error():
        # 2. Attention: one exchange in, full attention on local heads, one exchange back. RoPE sees global lengths.
        binding = bind(base, mesh, kernel=kernel)

        # 3. Memory: token-wise work in tiles, layers run again from their anchors, saved tensors on the host.
        if given is not None:
            if not away:
                move(model, mesh.device)
            job = job_of(
                model,
                mesh,
                weights,
                optimizer,
                fused=fuse,
                compute_dtype=compute_dtype,
                replicas=replicas,
                on_host=away,
            )
            planner = AutoMemory.of(model, base, mesh, job, budget, given, host)
            device = torch.device("cpu") if away else mesh.device
            install_memory(binding, layers, planner, fuse=fuse, sharded=grouped, device=device)
        elif grouped and allow_untested and surveyed(base, layers) is None:
            with randomized(base, layers, torch.device("cpu")):
                passing_of(binding, layers).refuse_copies()

        # 4. Weights: FSDP2 over all ranks, or over each of several groups; gradients summed in fp32; on the host if asked.
        place_weights(
            model,
            layers,
            mesh,
            weights,
            replicas=replicas,
            on_host=on_host,
            compute_dtype=compute_dtype,
            uneven=has_experts(base.config),
            inner=base,
        )
        earlier.follow(model, handle)
        guard_weights(handle, model, base)
        handle.keep(Placed.of(model))
    return model


def read_memory(memory: object) -> MemoryPlan | Decided | None:
    """A whole plan, what is decided of one ("auto": nothing), or None for none."""
    if memory is None or isinstance(memory, MemoryPlan):
        return memory
    if isinstance(memory, Mapping):
        return Decided.of(memory)
    if isinstance(memory, str) and memory == "auto":
        return Decided()
    raise UnsupportedError(f"memory={shown(memory)}: pass 'auto', None, a dict of choices, or an ithaca.MemoryPlan")


def check_settings(optimizer: object, compute_dtype: object, *, fuse: object, allow_untested: object) -> None:
    """Refuse words and types that no model takes."""
    if optimizer not in get_args(Optimizer):
        raise UnsupportedError(f"optimizer={shown(optimizer)}: choose one of {', '.join(get_args(Optimizer))}")
    if compute_dtype is not None and compute_dtype not in _COMPUTE:
        raise UnsupportedError(f"compute_dtype={compute_dtype!r}: pass one of {', '.join(map(str, _COMPUTE))}, or None")
    for name, flag in (("fuse", fuse), ("allow_untested", allow_untested)):
        if not (isinstance(flag, bool) or (name == "fuse" and flag is None)):
            raise UnsupportedError(f"{name}={shown(flag)}: pass True or False")


def read_budget(name: str, given: float | str | None) -> int | None:
    """Bytes, from a number or from a text as run files have it; None where nothing is set."""
    if given is None:
        return None
    try:
        budget = int(no_truth(parse_bytes(given)))  # type: ignore[call-overload]
    except (ValueError, TypeError, OverflowError):
        budget = 0
    if budget < 1:
        raise UnsupportedError(f"{name}={shown(given)}: pass bytes above 0, such as 40e9 or '40GB', or None")
    try:
        return with_unit(budget)
    except ValueError as error:
        raise UnsupportedError(f"{name}={given!r}: {error}") from None


def head_counts(base: nn.Module) -> tuple[int, int]:
    """Query heads and key-value heads, as the config has them; of the layer with the fewest, where layers differ."""
    config = base.config.get_text_config()  # type: ignore[union-attr, operator]
    each = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    counts = [(int(own.num_attention_heads), getattr(own, "num_key_value_heads", None)) for own in each]
    return min((heads, int(kv_heads or heads)) for heads, kv_heads in counts)
