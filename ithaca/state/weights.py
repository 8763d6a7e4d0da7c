"""Where the weights live: FSDP2 over all ranks, copies on all ranks, or left to the caller.

`"shard"`: each decoder layer is one FSDP2 group, the rest another; gradients are summed (divide factor 1: the loss
has already been divided by the global token count), in fp32 where the weights are of lower precision.
`"replicate"` is the same machinery on a mesh of world x 1: every rank keeps whole weights.
`"none"`: weights are the caller's, whose wrapper is expected to average gradients over all ranks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ithaca.errors import UnsupportedError
from ithaca.mesh import Mesh

Weights = Literal["shard", "replicate", "none"]
_SUMS = "_ithaca_sums_gradients"


def place_weights(
    model: nn.Module,
    layers: list[nn.Module],
    mesh: Mesh,
    weights: Weights,
    *,
    compute_dtype: torch.dtype | None = None,
    uneven: bool = False,
) -> None:
    """Apply FSDP2 to `layers` and to the whole of `model`, in place.

    `uneven`: a rank may leave weights unused that others use (experts no token of its shard chose).
    """
    if weights == "none":
        return
    model.to(mesh.device)
    model.__dict__[_SUMS] = True
    if mesh.world == 1 and compute_dtype is None:
        # Nothing to shard and nothing to sum; FSDP2 would still copy every layer's weights to use them.
        return
    box = mesh.weights
    if weights == "replicate":
        box = init_device_mesh(mesh.device.type, (mesh.world, 1), mesh_dim_names=("replicate", "shard"))
    dtype = compute_dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
    reduce = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce if reduce != dtype else None)
    for module in (*layers, model):
        # The root too is given up after forward: FSDP2 would keep it gathered, and a step taken after an evaluation
        # would then go on with embeddings and head as they were before it.
        fully_shard(module, mesh=box, mp_policy=policy, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A plain sum on every backend: gloo has no scaled sum, and a factor of 1 needs none.
            module.set_force_sum_reduction_for_comms(True)
            if uneven and hasattr(module, "set_reduce_scatter_unused_params"):
                # Ranks must reduce the same weights; torch 2.11 cannot be told so and ends with a size mismatch.
                module.set_reduce_scatter_unused_params(True)


def recover(model: nn.Module) -> None:
    """Make a model usable again after an exception ended a step in its middle, on all ranks; gradients are dropped."""
    if isinstance(model, FSDPModule):
        if not hasattr(model, "reset_iter_state"):
            raise UnsupportedError(
                f"torch {torch.__version__} cannot clear FSDP2's state after an exception: build the model anew, or "
                "use torch 2.13 or newer"
            )
        model.reset_iter_state()
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
    return not any(_SUMS in module.__dict__ for module in model.modules())
