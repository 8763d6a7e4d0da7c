"""Weight sharding by FSDP2: over all ranks, over copies on groups of ranks (HSDP), or left to the caller.

Four ranks hold a layer's weights w0 w1 w2 w3, with their gradients and optimizer state:

    weights           rank 0       rank 1       rank 2       rank 3
    shard             w0           w1           w2           w3
    shard, replicas=2 w0 w1        w2 w3        w0 w1        w2 w3      neighbouring ranks: gathers stay inside a node
    replicate         w0 w1 w2 w3  w0 w1 w2 w3  w0 w1 w2 w3  w0 w1 w2 w3   the same on a mesh of world x 1
    none              the caller's own wrapper, which averages gradients over all ranks

Each decoder layer is one FSDP2 group and the rest of the model another: an all-gather collects a group's weights before
the group runs, a reduce-scatter sums its gradients after backward. Gradients are summed over all ranks and copies
(divide factor 1: the loss is already divided by the global token count), in fp32 if the weights are of lower precision.
Ranks with different weights get rank 0's first.

`on_host="everything"` keeps sharded weights, gradients and so the optimizer's state in pinned host memory; a layer's
weights are on the device while the layer runs. On a CPU device this changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ithaca.arguments import check_kind, named_arguments
from ithaca.errors import MeshError, UnsupportedError
from ithaca.handle import Handle, handle_of
from ithaca.mesh import Mesh
from ithaca.planning.memory_plan import Weights
from ithaca.state.weights.equal_weights import make_equal
from ithaca.state.weights.shardable import ParameterCount
from ithaca.state.weights.whole_weight_methods import refuse_copy, refuse_pickle

OnHost = Literal["nothing", "everything"]
_COMPUTE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_REFUSED = {
    # torchao's CPUOffloadOptimizer steps with gradients as they arrive, before clipping, without an error.
    "optimizer": "optimizer state alone cannot go to the host and stay exact under clipping: use 'everything', or "
    "'nothing' with the optimizer 'adamw8bit', whose state is half of bf16's and a quarter of fp32's",
}


def leaves_device(mesh: Mesh, on_host: OnHost) -> bool:
    """True if weights are kept in host memory and used on another device."""
    return on_host == "everything" and mesh.device.type != "cpu"


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """Arguments of `parallelize` about the weights, checked. `replicas`: the number of copies of sharded weights."""

    mesh: Mesh
    weights: Weights = "shard"
    replicas: int = 1
    on_host: OnHost = "nothing"
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        weights, replicas, on_host, world = self.weights, self.replicas, self.on_host, self.mesh.world
        if weights not in get_args(Weights):
            raise UnsupportedError(f"weights={weights!r}: choose one of {', '.join(get_args(Weights))}")
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1 or world % replicas:
            works = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            raise MeshError(f"replicas={replicas!r} over {world} ranks: a divisor of the world is needed: {works}")
        if replicas > 1 and weights != "shard":
            raise UnsupportedError(
                f"replicas={replicas} with weights={weights!r}: copies of sharded weights need weights='shard'"
            )
        if on_host not in get_args(OnHost):
            instead = _REFUSED.get(str(on_host), f"choose one of {', '.join(get_args(OnHost))}")
            raise UnsupportedError(f"on_host={on_host!r}: {instead}")
        if on_host == "everything" and weights == "none":
            raise UnsupportedError("on_host='everything' with weights='none': weights are yours to place; use 'shard'")
        if self.compute_dtype is not None and self.compute_dtype not in _COMPUTE:
            choices = ", ".join(map(str, _COMPUTE))
            raise UnsupportedError(f"compute_dtype={self.compute_dtype!r}: pass one of {choices}, or None")

    @property
    def offloaded(self) -> bool:
        """True if weights are kept in host memory and used on another device."""
        return leaves_device(self.mesh, self.on_host)

    @property
    def sharded(self) -> bool:
        """True if FSDP2 is used; on one rank FSDP2 would copy every layer's weights for nothing."""
        needed = self.offloaded or self.mesh.world > 1 or self.compute_dtype is not None
        return self.weights != "none" and needed


def place_weights(
    model: nn.Module,
    layers: list[nn.Module],
    options: WeightOptions,
    *,
    uneven: bool = False,
    inner: nn.Module | None = None,
) -> None:
    """Apply FSDP2 to `layers` and to the whole of `model`, in place.

    `uneven`: a rank may leave weights unused that other ranks use (experts that no token of its shard chose). `inner`:
    the model inside `model`; becomes the root group if it has all the weights.
    """
    if options.weights == "none":
        return
    mesh, sharded = options.mesh, options.sharded
    handle = Handle.on(model, mesh)
    placement = Placement(torch.device("cpu") if options.offloaded else mesh.device)
    handle.keep(placement, while_sharded=sharded)
    handle.keep(ParameterCount.of(model), while_sharded=sharded)
    if not options.offloaded:
        move(model, mesh.device)
    if not sharded:
        return
    make_equal(model, mesh)
    # FSDP2 moves a layer to the device to shard it, so weights bound for the host pass through the device layer by layer.
    offload = _to_host() if options.offloaded else OffloadPolicy()
    fsdp_mesh = _fsdp_mesh(mesh, mesh.world if options.weights == "replicate" else options.replicas)
    policy = _precision(model, options.compute_dtype)
    # PEFT's generate calls the inner model without its wrapper, so the inner model must be the root.
    root = inner if inner is not None and set(inner.parameters()) == set(model.parameters()) else model
    for module in (*layers, root):
        own: Any = type(module)
        # The root is resharded after forward too. FSDP2 would keep it gathered, and an optimizer step taken after an
        # evaluation would then go on with the old embeddings and head.
        fully_shard(module, mesh=fsdp_mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)
        fsdp_class: Any = type(module)
        module.__class__ = _named_as(own, fsdp_class)
    placement.groups = tuple(module for module in model.modules() if isinstance(module, FSDPModule))
    for group in placement.groups:
        _sum_gradients(group, uneven)
    handle.add(root.register_forward_pre_hook(_Gathering(), prepend=True), while_sharded=True)


@cache
def _named_as(own: type[nn.Module], sharded: type[nn.Module]) -> type[nn.Module]:
    """Return FSDP2's class under the name of the module's own class.

    transformers, Trainer and PEFT choose by the class's name (label shifting, the model of an adapter). Calling the new
    class builds a module that is not sharded, as FSDP2's class does.
    """

    def build(_cls: type, /, *args: Any, **kwargs: Any) -> nn.Module:
        return own(*args, **kwargs)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    methods = {"__new__": build, "__deepcopy__": refuse_copy, "__reduce_ex__": refuse_pickle}
    return type(own.__name__, (sharded,), {**names, **methods})


@dataclass(eq=False, slots=True)
class _Gathering:
    """Forward hook that all-gathers all groups once before a first forward in inference mode.

    FSDP2 keeps the buffers of its first gather, and buffers made in inference mode cannot be trained with.
    """

    done: bool = False

    def __call__(self, model: nn.Module, args: Any) -> None:
        if not torch.is_inference_mode_enabled() or self.done:
            return
        with torch.inference_mode(False):
            # The root first: FSDP2 finds its root by the first module that is called.
            for module in (m for m in model.modules() if isinstance(m, FSDPModule)):
                module.unshard()
                module.reshard()
        self.done = True


def move(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device; weights on the meta device stay there until they are loaded."""
    if any(p.is_meta for p in model.parameters()):
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        model.to(device)


def device_of_weights(model: nn.Module) -> torch.device | None:
    """Return the device on which weights are kept; None before they are placed."""
    placement = placement_of(model)
    return None if placement is None else placement.device


def _to_host() -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=True)


def _fsdp_mesh(mesh: Mesh, replicas: int) -> DeviceMesh:
    """Return the ranks as a mesh of copies x shards, in which a copy's shards are on neighbouring ranks."""
    if replicas == 1:
        return mesh.weights
    shape = (replicas, mesh.world // replicas)
    return init_device_mesh(mesh.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _precision(model: nn.Module, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return FSDP2's mixed precision: all-gather and compute in `compute_dtype`, reduce-scatter in fp32 or wider."""
    dtype = compute_dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
    # Set even for fp32 weights: a model may be cast to a lower precision later.
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))


def _sum_gradients(module: FSDPModule, uneven: bool) -> None:
    module.set_gradient_divide_factor(1.0)
    # A plain sum on every backend: gloo has no pre-multiplied sum, and a factor of 1 needs none.
    module.set_force_sum_reduction_for_comms(True)
    if uneven and hasattr(module, "set_reduce_scatter_unused_params"):
        # All ranks must reduce the same weights. torch 2.11 has no such setting and ends with a size mismatch.
        module.set_reduce_scatter_unused_params(True)


@dataclass(eq=False)
class Placement:
    """Device of one model's weights, and FSDP2's reduction of their gradients over ranks.

    `groups`: FSDP2's modules, the root first. `summed`: gradients are summed, as sharded passes need; else averaged,
    FSDP2's own rule, for passes of whole sequences.
    """

    device: torch.device
    groups: tuple[FSDPModule, ...] = ()
    summed: bool = True
    backward: int = -1

    def set_gradient_reduction(self, *, summed: bool) -> None:
        """Choose sum or mean for the backward in progress or, outside of a backward, for the next ones."""
        if not self.groups:
            return
        # Private: the number of the running backward, -1 outside of one. Checked with torch 2.11 to 2.13.
        backward = torch._C._current_graph_task_id()
        if summed != self.summed:
            if backward == self.backward != -1:
                raise UnsupportedError(
                    "one backward goes through a sharded pass and one of ithaca.unsharded(model): call backward on each "
                    "loss by itself"
                )
            for module in self.groups:
                # None is FSDP2's own mean. With an explicit world size FSDP2 divides twice on a mesh of copies.
                module.set_gradient_divide_factor(1.0 if summed else None)  # type: ignore[arg-type]
        self.summed, self.backward = summed, backward


def placement_of(model: nn.Module) -> Placement | None:
    """Return the placement of the model's weights; None if the caller places them."""
    handle = handle_of(model)
    return None if handle is None else handle.part(Placement)


@named_arguments
def recover(model: nn.Module) -> None:
    """Make a model usable again after an exception inside a step, on all ranks; gradients are dropped."""
    check_kind("model", model, nn.Module, "pass the model, as in recover(model)")
    # The root comes before the layers.
    root: Any = next((module for module in model.modules() if isinstance(module, FSDPModule)), None)
    if root is not None:
        if not hasattr(root, "reset_iter_state"):
            raise UnsupportedError(
                f"torch {torch.__version__} cannot clear FSDP2's state after an exception: build the model anew, or "
                "use torch 2.13 or newer"
            )
        root.reset_iter_state()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _drop_gathered_gradients(module)
    model.zero_grad(set_to_none=True)


def _drop_gathered_gradients(module: Any) -> None:
    """Drop gradients of gathered weights that were never reduced, which the next step would add to.

    `reset_iter_state` leaves them, and these private attributes (torch 2.13) are the only access:
    https://github.com/pytorch/pytorch/issues/120879
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def averages_gradients(model: nn.Module) -> bool:
    """True if the caller's wrapper averages gradients over ranks after backward; False if they are summed here."""
    return placement_of(model) is None
