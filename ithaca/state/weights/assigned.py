"""Weights that were assigned, `p.data = backup[name]`, as averages and adversarial steps do: torch drops the values.

A weight that is spread over ranks is a DTensor, a wrapper around this rank's part. An assignment of `data` puts another
wrapper's storage under it and leaves the part as it was, with no word. The storage of a wrapper holds nothing, and has
an address all the same, which is how an assignment is seen before the next forward. WeightAddress in torch 2.11 to 2.13.
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
    """Before every forward of a sharded model, refuse weights whose `data` was assigned since now."""
    # The root comes before the layers. In front of FSDP2's own hook its weights are still spread.
    root: Any = next((module for module in model.modules() if isinstance(module, FSDPModule)), None)
    if root is not None:
        watch = _Watch()
        watch(root)
        handle.add(root.register_forward_pre_hook(watch, prepend=True), while_sharded=True)


# The weight, its wrapper's storage, and where its part lies.
WeightAddress = tuple[int, int, int]


@dataclass(eq=False)
class _Watch:
    """A hook, and what each weight was when it was last seen. No weak references: torch swaps no tensor that has one."""

    seen: dict[str, WeightAddress] = field(default_factory=dict)

    def __call__(self, root: nn.Module, _args: Any = ()) -> None:
        refuse_exchanged(root)
        for name, weight in root.named_parameters():
            if not isinstance(weight, DTensor):
                continue
            part = weight._local_tensor
            # An empty or fake part lies nowhere.
            now = id(weight), weight.untyped_storage()._cdata, part.data_ptr() or id(part)
            before = self.seen.get(name, now)
            # A model that moves or is filled has other parts too.
            if before[0] == now[0] and before[1] != now[1] and before[2] == now[2]:
                raise UnsupportedError(
                    f"the data of {name} was assigned (weight.data = ...), which torch drops without a word where weights "
                    "are split over ranks: call weight.copy_(value) inside torch.no_grad(), with values that were made of "
                    "the split weights, on every rank"
                )
            self.seen[name] = now
