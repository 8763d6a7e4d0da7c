"""Refusal of assigned weights, `p.data = backup[name]`, whose values torch drops.

A sharded weight is a DTensor, a wrapper around this rank's part. An assignment of `data` replaces the wrapper's storage
and leaves the part unchanged, without an error. The storage of a wrapper is empty but has an address, and the address
shows the assignment before the next forward. WeightAddress in torch 2.11 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ithaca.errors import UnsupportedError
from ithaca.handle import Handle
from ithaca.state.weights.shardable import refuse_exchanged


def refuse_assigned(handle: Handle, model: nn.Module) -> None:
    """Refuse, before every forward of a sharded model, weights whose `data` was assigned since this call."""
    # The root comes first in modules(). Prepended: before FSDP2's own hook the weights are still sharded.
    root: Any = next((module for module in model.modules() if isinstance(module, FSDPModule)), None)
    if root is not None:
        watch = _Watch()
        watch(root)
        handle.add(root.register_forward_pre_hook(watch, prepend=True), while_sharded=True)


# The weight's id, the address of its wrapper's storage, and the address of its part.
WeightAddress = tuple[int, int, int]


@dataclass(eq=False)
class _Watch:
    """Forward hook with each weight's last addresses. No weak references: torch cannot swap a tensor that has one."""

    seen: dict[str, WeightAddress] = field(default_factory=dict)

    def __call__(self, root: nn.Module, _args: Any = ()) -> None:
        refuse_exchanged(root)
        for name, weight in root.named_parameters():
            if not isinstance(weight, DTensor):
                continue
            part = weight._local_tensor
            # An empty or fake part has no address.
            now = id(weight), weight.untyped_storage()._cdata, part.data_ptr() or id(part)
            before = self.seen.get(name, now)
            # A model that is moved or loaded has another part too.
            if before[0] == now[0] and before[1] != now[1] and before[2] == now[2]:
                raise UnsupportedError(
                    f"the data of {name} was assigned (weight.data = ...), which torch drops without a word where weights "
                    "are split over ranks: call weight.copy_(value) inside torch.no_grad(), with values that were made of "
                    "the split weights, on every rank"
                )
            self.seen[name] = now
