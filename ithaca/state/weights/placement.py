"""Where the weights live: FSDP2 over all ranks, copies on all ranks, or left to the caller.

`"shard"`: each decoder layer is one FSDP2 group, the rest another; gradients are summed (divide factor 1: the loss
has already been divided by the global token count), in fp32 where the weights are of lower precision. With
`replicas` > 1 (HSDP) neighbouring ranks shard one copy, so that gathers stay inside a node; gradients are summed over
the copies too. `"replicate"` is the same machinery on a mesh of world x 1: every rank keeps whole weights. Either way
ranks that come with different weights are given rank 0's first.
`"none"`: weights are the caller's, whose wrapper is expected to average gradients over all ranks.

`on_host="everything"` keeps sharded weights, their gradients and so the optimizer's state in pinned host memory; a
layer's weights are on the device while it runs. Where the device is the host there is nothing to move.
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
from ithaca.state.weights.same_start import make_alike
from ithaca.state.weights.shardable import ParameterCount
from ithaca.state.weights.whole_weight_methods import refuse_copy, refuse_pickle

Weights = Literal["shard", "replicate", "none"]
OnHost = Literal["nothing", "everything"]
_REFUSED = {
    # torchao's CPUOffloadOptimizer takes gradients as they arrive, before they are clipped, and says nothing of it.
    "optimizer": "optimizer state alone cannot go to the host and stay exact under clipping: use 'everything', or "
    "'nothing' with the optimizer 'adamw8bit', whose state is half of bf16's and a quarter of fp32's",
}


def check_placement(mesh: Mesh, weights: Weights, replicas: int, on_host: OnHost) -> None:
    """Refuse what cannot be placed so, before anything is."""
    if weights not in get_args(Weights):
        raise UnsupportedError(f"weights={weights!r}: choose one of {', '.join(get_args(Weights))}")
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1 or mesh.world % replicas:
        works = ", ".join(str(n) for n in range(1, mesh.world + 1) if mesh.world % n == 0)
        raise MeshError(f"replicas={replicas!r} over {mesh.world} ranks: a divisor of the world is needed: {works}")
    if replicas > 1 and weights != "shard":
        raise UnsupportedError(
            f"replicas={replicas} with weights={weights!r}: copies of sharded weights need weights='shard'"
        )
    if on_host not in get_args(OnHost):
        instead = _REFUSED.get(str(on_host), f"choose one of {', '.join(get_args(OnHost))}")
        raise UnsupportedError(f"on_host={on_host!r}: {instead}")
    if on_host == "everything" and weights == "none":
        raise UnsupportedError("on_host='everything' with weights='none': weights are yours to place; use 'shard'")


def leaves_device(mesh: Mesh, on_host: OnHost) -> bool:
    """Whether weights are kept away from where they are used."""
    return on_host == "everything" and mesh.device.type != "cpu"


def takes_groups(mesh: Mesh, weights: Weights, on_host: OnHost, compute_dtype: torch.dtype | None) -> bool:
    """Whether FSDP2 is asked at all: on one rank it would only copy every layer's weights to use them."""
    away = leaves_device(mesh, on_host)
    return weights != "none" and (away or mesh.world > 1 or compute_dtype is not None)


def place_weights(
    model: nn.Module,
    layers: list[nn.Module],
    mesh: Mesh,
    weights: Weights,
    *,
    replicas: int = 1,
    on_host: OnHost = "nothing",
    compute_dtype: torch.dtype | None = None,
    uneven: bool = False,
    inner: nn.Module | None = None,
) -> None:
    """Apply FSDP2 to `layers` and to the whole of `model`, in place.

    `replicas`: over how many groups of neighbouring ranks the weights are copied, each sharding its own copy.
    `uneven`: a rank may leave weights unused that others use (experts no token of its shard chose). `inner`: the model
    that `model` is wrapped around, which takes the wrapper's place where it has all the weights.
    """
    check_placement(mesh, weights, replicas, on_host)
    if weights == "none":
        return
    handle, away = Handle.on(model, mesh), leaves_device(mesh, on_host)
    grouped = takes_groups(mesh, weights, on_host, compute_dtype)
    placement = Placement(torch.device("cpu") if away else mesh.device)
    handle.keep(placement, while_sharded=grouped)
    handle.keep(ParameterCount.of(model), while_sharded=grouped)
    if not away:
        move(model, mesh.device)
    if not grouped:
        return
    make_alike(model, mesh)
    # Weights bound for the host pass through the device layer by layer: FSDP2 takes there what it shards.
    offload = _to_host() if away else OffloadPolicy()
    box = _box(mesh, mesh.world if weights == "replicate" else replicas)
    policy = _precision(model, compute_dtype)
    # PEFT's generate, and whoever else takes the model out of its wrapper, calls the inner one alone.
    root = inner if inner is not None and set(inner.parameters()) == set(model.parameters()) else model
    for module in (*layers, root):
        own: Any = type(module)
        # The root too is given up after forward: FSDP2 would keep it gathered, and a step taken after an evaluation
        # would then go on with embeddings and head as they were before it.
        fully_shard(module, mesh=box, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)
        sharded: Any = type(module)
        module.__class__ = _named_as(own, sharded)
    placement.groups = tuple(module for module in model.modules() if isinstance(module, FSDPModule))
    for group in placement.groups:
        _sum_gradients(group, uneven)
    handle.add(root.register_forward_pre_hook(_Gathering(), prepend=True), while_sharded=True)


@cache
def _named_as(own: type[nn.Module], sharded: type[nn.Module]) -> type[nn.Module]:
    """FSDP2's class under the name that the module's class had: transformers, Trainer and PEFT choose by it (how labels
    are shifted, which model an adapter belongs to). A call of it makes a module that is not sharded, as FSDP2's does."""

    def build(_cls: type, /, *args: Any, **kwargs: Any) -> nn.Module:
        return own(*args, **kwargs)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    methods = {"__new__": build, "__deepcopy__": refuse_copy, "__reduce_ex__": refuse_pickle}
    return type(own.__name__, (sharded,), {**names, **methods})


@dataclass(eq=False, slots=True)
class _Gathering:
    """A hook: FSDP2 keeps what it first gathers weights into; made in inference mode, that could never be trained with."""

    done: bool = False

    def __call__(self, model: nn.Module, args: Any) -> None:
        if not torch.is_inference_mode_enabled() or self.done:
            return
        with torch.inference_mode(False):
            # The root first: it is by this call that it learns that it is one.
            for module in (m for m in model.modules() if isinstance(m, FSDPModule)):
                module.unshard()
                module.reshard()
        self.done = True


def move(model: nn.Module, device: torch.device) -> None:
    """Move what is there; weights on the meta device stay there until they are loaded."""
    if any(p.is_meta for p in model.parameters()):
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        model.to(device)


def home_of(model: nn.Module) -> torch.device | None:
    """Where weights that are still on the meta device belong; None before they are placed."""
    placement = placement_of(model)
    return None if placement is None else placement.home


def _to_host() -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=True)


def _box(mesh: Mesh, replicas: int) -> DeviceMesh:
    """The ranks as copies x shards: row by row, so that a copy's shards are on neighbouring ranks."""
    if replicas == 1:
        return mesh.weights
    shape = (replicas, mesh.world // replicas)
    return init_device_mesh(mesh.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _precision(model: nn.Module, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    dtype = compute_dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
    # Said even where nothing is cast: a model may be sent to a lower precision later.
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))


def _sum_gradients(module: FSDPModule, uneven: bool) -> None:
    module.set_gradient_divide_factor(1.0)
    # A plain sum on every backend: gloo has no scaled sum, and a factor of 1 needs none.
    module.set_force_sum_reduction_for_comms(True)
    if uneven and hasattr(module, "set_reduce_scatter_unused_params"):
        # Ranks must reduce the same weights; torch 2.11 cannot be told so and ends with a size mismatch.
        module.set_reduce_scatter_unused_params(True)


@dataclass(eq=False)
class Placement:
    """Where one model's weights belong, and how FSDP2 reduces their gradients over ranks, if there are several.

    `groups`: FSDP2's, the root first. Gradients of shards are summed, those of whole sequences averaged as FSDP2 does.
    """

    home: torch.device
    groups: tuple[FSDPModule, ...] = ()
    summed: bool = True
    backward: int = -1

    def choose(self, *, summed: bool) -> None:
        """For the backward that begins, or outside of one for those to come."""
        if not self.groups:
            return
        backward = torch._C._current_graph_task_id()
        if summed != self.summed:
            if backward == self.backward != -1:
                raise UnsupportedError(
                    "one backward goes through a sharded pass and one of ithaca.unsharded(model): call backward on each "
                    "loss by itself"
                )
            for module in self.groups:
                # None is FSDP2's own mean. Given the number, it divides twice where weights are copied and not sharded.
                module.set_gradient_divide_factor(1.0 if summed else None)  # type: ignore[arg-type]
        self.summed, self.backward = summed, backward


def placement_of(model: nn.Module) -> Placement | None:
    """Return where the model's weights were placed; None if they are the caller's to place."""
    handle = handle_of(model)
    return None if handle is None else handle.part(Placement)


@named_arguments
def recover(model: nn.Module) -> None:
    """Make a model usable again after an exception ended a step in its middle, on all ranks; gradients are dropped."""
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
    """Gradients of gathered weights that were never reduced: the reset leaves them, and the next step would add to
    them. There is no public way to them."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def averages_gradients(model: nn.Module) -> bool:
    """Whether gradients are averaged over ranks after backward (the caller's wrapper) rather than summed (ours)."""
    return placement_of(model) is None
