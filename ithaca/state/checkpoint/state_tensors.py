"""`state_tensors`: all training state as named tensors: weights, moments and step counts.

    model.layers.0.self_attn.q_proj.weight
    optimizer.layers.0.self_attn.q_proj.weight.exp_avg

Names do not depend on the number of ranks, so a checkpoint of four ranks can be read by one. The tensors share memory
with the model and the optimizer, so reading into them loads the state. Call `state_tensors` between two steps; the
tensors stay valid while FSDP2 has layers gathered, because they are the shards themselves.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.errors import CheckpointError
from ithaca.state.checkpoint.low_bit_moments import moment

_STEP = "step"


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Return weights and persistent buffers (with adapters: trained weights alone), and the optimizer's state by weight.

    An optimizer that has not stepped gets its initial state.
    """
    adapted = hasattr(model, "peft_config")
    trained = dict(model.named_parameters())
    tensors = {f"model.{key}": p.detach() for key, p in trained.items() if p.requires_grad or not adapted}
    if not adapted:
        kept = model.state_dict().keys()
        tensors |= {f"model.{key}": buffer for key, buffer in model.named_buffers() if key in kept}
    if optimizer is not None:
        start(optimizer)
        for key, parameter in trained.items():
            for name, value in optimizer.state.get(parameter, {}).items():
                tensors |= moment(f"optimizer.{key}.{name}", value, parameter, getattr(optimizer, "block_size", 0))
    # DCP cannot slice a tensor without dims in a file, so its number is saved as a row of one.
    return {key: tensor.view(1) if tensor.ndim == 0 else tensor for key, tensor in tensors.items()}


def fingerprint(model: nn.Module) -> str:
    """Return a short digest of the architecture and of all weights' names and shapes, the same at any number of ranks."""
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    lines = sorted(f"{key} {list(p.shape)} {p.requires_grad}" for key, p in model.named_parameters())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return f"{type(base).__name__.removeprefix('FSDP')} {len(lines)} {digest}"


def check_fingerprint(saved: str, model: nn.Module) -> None:
    """Refuse a checkpoint of another model; `Checkpoints.load` names the weights that differ."""
    own = fingerprint(model)
    if saved == own:
        return
    (kind, count, _), (own_kind, own_count, _) = saved.split(), own.split()
    what = f"a {kind} of {count} weights" if (kind, count) != (own_kind, own_count) else f"a {kind} of other sizes"
    raise CheckpointError(
        f"the checkpoint is of {what}, this model is a {own_kind} of {own_count} weights: resume with the model it was "
        "made with, or name another output folder"
    )


def start(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, all zero; weights, gradients and learning rates stay.

    A step at learning rate 0, as in torch's own checkpointing, but one parameter at a time, so that the zero gradients
    need no second copy of the weights.
    """
    groups = optimizer.param_groups
    whole = [list(group["params"]) for group in groups]
    rates = [group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"] for group in groups]
    try:
        for group in groups:
            set_rate(group, 0.0)
            group["params"] = []
        for group, parameters in zip(groups, whole, strict=True):
            for parameter in parameters:
                if parameter.requires_grad and not optimizer.state.get(parameter):
                    _start_one(optimizer, group, parameter)
    finally:
        for group, parameters, rate in zip(groups, whole, rates, strict=True):
            group["params"] = parameters
            set_rate(group, rate)


def _start_one(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
    gradient = parameter.grad
    group["params"] = [parameter]
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    finally:
        parameter.grad = gradient
        group["params"] = []
    steps = optimizer.state[parameter].get(_STEP)
    if isinstance(steps, Tensor):
        steps.zero_()


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set the learning rate of a group; torchao keeps it in a tensor that must not be exchanged."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate) if not isinstance(rate, Tensor) else group["lr"].copy_(rate)
    else:
        group["lr"] = rate
