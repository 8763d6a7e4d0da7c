"""`parallelize`: the ordered list of what happens to a model. A newcomer's first file.

`parallelize` takes a Hugging Face causal language model (or a PEFT model around one), changes it in place and returns
it, ready for `causal_loss`. Wrong arguments and models that would not be exact are refused before the first collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from ithaca.arguments import named_arguments, shown
from ithaca.attention.input_checks import check_heads
from ithaca.attention.kernels import check_name
from ithaca.errors import UnsupportedError
from ithaca.handle import Handle
from ithaca.mesh import Mesh, check_mesh
from ithaca.models.binding import bind
from ithaca.models.bound import Binding
from ithaca.models.discover.findings import surveyed
from ithaca.models.discover.mixing import check_mixing
from ithaca.models.discover.passing import find_passing
from ithaca.models.discover.random_weights import randomized
from ithaca.models.experts import has_experts
from ithaca.models.layers.install import install_memory
from ithaca.models.planner.plan_in_force import AutoMemory, job_of
from ithaca.models.refusals.memory_plans import plan_for
from ithaca.models.support import ModelParts, check_model
from ithaca.models.weight_versions import WeightVersions
from ithaca.planning.memory_plan import Decided, MemoryPlan, Optimizer
from ithaca.quantities import parse_bytes, refuse_bool, require_unit
from ithaca.state.optimizer.existing_optimizers import ExistingOptimizers
from ithaca.state.weights.guards import guard_weights
from ithaca.state.weights.placement import OnHost, WeightOptions, Weights, move, place_weights
from ithaca.state.weights.shardable import check_shardable

M = TypeVar("M", bound=nn.Module)


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
    """Make `model` run on shards of sequences over `mesh`, exactly; change it in place and return it.

    `weights`: "shard" (FSDP2 over all ranks), "replicate", or "none" (your own DDP, FSDP or DeepSpeed, which averages
    gradients over all ranks). `replicas`: number of copies of sharded weights, each over neighbouring ranks.
    `on_host`: "everything" keeps weights, gradients and optimizer state in host memory. `kernel`: "auto" or a name from
    `ithaca.KERNELS`. `memory`: activation checkpointing, layer by layer: "auto" for the least recompute that fits
    `memory_budget`, in bytes or as "40GB" (three quarters of the device), and a rank's `host_budget` (three quarters of
    its part of what is free there), beside the state of `optimizer` ("adamw", "adamw8bit", "bf16_sr" or "none"); a dict
    such as {"offload": False, "mlp_tile": 4096} for the same with that decided (`layers`, `offload`, `mlp_tile`,
    `loss_tile`, `head_groups`); a whole `ithaca.MemoryPlan`; or None to leave it to autograd. `fuse`: torch.compile norms,
    activations, rotary embeddings and the loss (on GPUs, unless False; not with memory=None). `compute_dtype`: dtype
    that FSDP2 casts weights to for computing, for example bf16 over fp32 weights. `allow_untested` lets an architecture
    through that no parity run has covered.
    """
    check_mesh(mesh)
    placing = WeightOptions(mesh, weights, replicas, on_host, compute_dtype)
    check_name(kernel)
    planning = MemoryOptions.read(mesh, memory, memory_budget, host_budget, optimizer, fuse)
    check_flags(fuse=fuse, allow_untested=allow_untested)
    parts = ModelParts.of(model)

    # 1. Refuse by name what would not be exact.
    check_model(parts, allow_untested=allow_untested)
    existing = ExistingOptimizers.of(model)
    if placing.sharded:
        check_shardable(model, parts.layers)
        existing.check_state()
    check_heads(*head_counts(parts.base), mesh)
    plan = plan_for(parts, planning.memory, allow_untested=allow_untested)
    check_mixing(parts.base, parts.layers, mesh)
    if placing.sharded:
        existing.check_equal(mesh)

    # From here on the model is changed, and an error takes off again what is on its handle.
    handle = Handle.on(parts.base, mesh)
    with handle.undone_on_error():
        # 2. Attention: one exchange in, full attention on local heads, one exchange back. RoPE sees global lengths.
        binding = bind(parts.base, mesh, kernel=kernel)
        # 3. Memory: token-wise work in tiles, layers run again from their anchors, saved tensors on the host.
        if plan is not None:
            _apply_memory_plan(binding, parts, placing, planning, plan)
        elif placing.sharded and allow_untested:
            _refuse_copied_arguments(binding, parts)
        # 4. Weights: FSDP2 over all ranks, or over each of several groups; gradients summed in fp32; on the host if asked.
        place_weights(model, parts.layers, placing, uneven=has_experts(parts.base.config), inner=parts.base)
        # 5. Optimizers from before step the shards; wrong uses of shards are refused from now on.
        existing.follow(model, handle)
        guard_weights(handle, model, parts.base)
        handle.keep(WeightVersions.of(model))
    return model


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Arguments of `parallelize` about activation memory, checked. Budgets are in bytes, None for a share of the free."""

    memory: MemoryPlan | Decided | None
    budget: int | None
    host_budget: int | None
    optimizer: Optimizer
    fuse: bool

    @classmethod
    def read(
        cls, mesh: Mesh, memory: object, budget: Any, host_budget: Any, optimizer: Optimizer, fuse: bool | None
    ) -> MemoryOptions:
        """Read the arguments as the user gave them; refuse those that no model takes."""
        if optimizer not in get_args(Optimizer):
            raise UnsupportedError(f"optimizer={shown(optimizer)}: choose one of {', '.join(get_args(Optimizer))}")
        return cls(
            read_memory(memory),
            read_budget("memory_budget", budget),
            read_budget("host_budget", host_budget),
            optimizer,
            mesh.device.type == "cuda" if fuse is None else fuse,
        )


def _apply_memory_plan(
    binding: Binding,
    parts: ModelParts,
    placing: WeightOptions,
    planning: MemoryOptions,
    plan: MemoryPlan | Decided,
) -> None:
    """Put the layers under a memory plan: the given one, or one that is made when the first batch comes."""
    model, layers, mesh = parts.model, parts.layers, placing.mesh
    if not placing.offloaded:
        move(model, mesh.device)
    job = job_of(
        model,
        mesh,
        placing.weights,
        planning.optimizer,
        fused=planning.fuse,
        compute_dtype=placing.compute_dtype,
        replicas=placing.replicas,
        on_host=placing.offloaded,
    )
    planner = AutoMemory.of(parts, mesh, job, planning.budget, plan, planning.host_budget)
    device = torch.device("cpu") if placing.offloaded else mesh.device
    install_memory(binding, layers, planner, fuse=planning.fuse, sharded=placing.sharded, device=device)


def _refuse_copied_arguments(binding: Binding, parts: ModelParts) -> None:
    """Refuse an unmeasured model whose layers change their arguments: FSDP2 hands them copies."""
    if surveyed(parts.base, parts.layers) is None:
        with randomized(parts.base, parts.layers, torch.device("cpu")):
            find_passing(binding, parts.layers).refuse_copies()


def check_flags(*, fuse: object, allow_untested: object) -> None:
    """Refuse flags that are not booleans: every text is true, "no" too."""
    for name, flag in (("fuse", fuse), ("allow_untested", allow_untested)):
        if not (isinstance(flag, bool) or (name == "fuse" and flag is None)):
            raise UnsupportedError(f"{name}={shown(flag)}: pass True or False")


def read_memory(memory: object) -> MemoryPlan | Decided | None:
    """Return a whole plan, or the decided part of a plan ("auto": nothing decided); None for autograd's own memory."""
    if memory is None or isinstance(memory, MemoryPlan):
        return memory
    if isinstance(memory, Mapping):
        return Decided.of(memory)
    if isinstance(memory, str) and memory == "auto":
        return Decided()
    raise UnsupportedError(f"memory={shown(memory)}: pass 'auto', None, a dict of choices, or an ithaca.MemoryPlan")


def read_budget(name: str, given: float | str | None) -> int | None:
    """Return the bytes of a number or of a text such as '40GB'; None if nothing is set."""
    if given is None:
        return None
    try:
        budget = int(refuse_bool(parse_bytes(given)))  # type: ignore[call-overload]
    except (ValueError, TypeError, OverflowError):
        budget = 0
    if budget < 1:
        raise UnsupportedError(f"{name}={shown(given)}: pass bytes above 0, such as 40e9 or '40GB', or None")
    try:
        return require_unit(budget)
    except ValueError as error:
        raise UnsupportedError(f"{name}={given!r}: {error}") from None


def head_counts(base: nn.Module) -> tuple[int, int]:
    """Return the config's numbers of query heads and key-value heads, of the layer with the fewest if layers differ."""
    config = base.config.get_text_config()  # type: ignore[union-attr, operator]
    each = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    counts = [(int(own.num_attention_heads), getattr(own, "num_key_value_heads", None)) for own in each]
    return min((heads, int(kv_heads or heads)) for heads, kv_heads in counts)
