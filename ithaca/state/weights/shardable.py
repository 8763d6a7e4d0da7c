"""Refusals of models that FSDP2 would train wrongly without an error, before sharding and in every pass.

A parameter of two groups is sharded twice. A parameter that is added later stays whole, and no rank sums its
gradients. A gradient hook stays with the parameter that the shard has replaced, and on a shard is never called.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ithaca.errors import UnsupportedError
from ithaca.handle import handle_of

_CALLED = "register_post_accumulate_grad_hook"


def check_shardable(model: nn.Module, layers: list[nn.Module]) -> None:
    """Refuse shared weights, hooks and gradients, which are lost when `layers` and the rest become FSDP2 groups."""
    own = set(layers)
    groups = [f"{key}." for key, module in model.named_modules(remove_duplicate=False) if module in own]
    seen: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"{name} has a hook, which its shard would not have: call {_CALLED} after parallelize"
            )
        if parameter.grad is not None:
            raise UnsupportedError(
                f"{name} has a gradient, which its shard would not have: call model.zero_grad() before parallelize, or "
                "backward after it"
            )
        group = next((each for each in groups if name.startswith(each)), "")
        first, other = seen.setdefault(parameter, (group, name))
        if first != group:
            raise UnsupportedError(
                f"{name} is {other}, and FSDP2 shards each layer by itself: give each its own, "
                "or wrap the model in DDP and pass weights='none'"
            )


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Number of parameters of a model when they were placed."""

    root: nn.Module
    parameters: int

    @classmethod
    def of(cls, model: nn.Module) -> ParameterCount:
        return cls(model, _count(model))


def refuse_added(model: nn.Module) -> None:
    """Refuse parameters, and hooks on them, that were added after the placement."""
    handle = handle_of(model)
    placed = None if handle is None else handle.part(ParameterCount)
    if placed is None:
        return
    if (added := _count(model) - placed.parameters) > 0:
        raise UnsupportedError(
            f"{type(model).__name__} got {added} parameters after parallelize: add adapters and the like before it"
        )
    root = placed.root
    if any(isinstance(module, FSDPModule) for module in root.modules()) and not _all_plain_shards(root):
        _refuse_first_wrong(root)


def refuse_exchanged(root: nn.Module) -> None:
    """Refuse a weight that was exchanged for another parameter: FSDP2 keeps using the parameter that it sharded."""
    # Private state of FSDP2, checked with torch 2.11 to 2.13. No public way shows which parameter FSDP2 gathers.
    seen: set[nn.Parameter | None] = set()
    for module in root.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            # Before the first pass FSDP2 still looks parameters up; in states other than sharded the module has whole weights.
            taken = group.is_sharded and group._reset_sharded_params
            for each in group.fsdp_params if group.is_sharded else ():
                info = each._module_info
                found = info.module._parameters.get(info.param_name)
                kept = isinstance(found, nn.Parameter) and (found is each.sharded_param or not taken)
                if not kept or found in seen:
                    raise UnsupportedError(
                        f"the {info.param_name} of a {type(info.module).__name__} was exchanged for another parameter, or "
                        "tied to one, after parallelize, which FSDP2 does not see: do so before parallelize, or change "
                        "the weight in place with weight.copy_(value)"
                    )
                seen.add(found)


def _count(model: nn.Module) -> int:
    """Return the number of parameter slots; called in every pass, so without building names."""
    return sum(weight is not None for module in model.modules() for weight in module._parameters.values())


def _all_plain_shards(root: nn.Module) -> bool:
    weights = (weight for module in root.modules() for weight in module._parameters.values() if weight is not None)
    return all(isinstance(weight, DTensor) and not weight._backward_hooks for weight in weights)


def _refuse_first_wrong(root: nn.Module) -> None:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The caller may have gathered weights early (module.unshard()).
            module.reshard()
    for name, weight in root.named_parameters():
        if not isinstance(weight, DTensor):
            raise UnsupportedError(f"{name} was replaced after parallelize, which sharded the others: do so before it")
        if weight._backward_hooks:
            raise UnsupportedError(
                f"{name} has a hook, which FSDP2 never calls: use {_CALLED} instead of register_hook"
            )
