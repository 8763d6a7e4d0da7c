"""Sharded weights between a forward pass and its backward.

autograd refuses a backward through weights that were changed since the forward pass. FSDP2 gathers them anew in backward,
where autograd sees tensors that nobody has touched: gradients at the new weights from activations of the old ones. Here
the shards' own counts of changes are noted at the end of a pass and compared as its backward begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from ithaca.errors import UnsupportedError
from ithaca.models.handed_out import NEVER, current_backward


@dataclass(eq=False, slots=True)
class Placed:
    """The trained shards of one model; an embedding's weight is left out, whose gradient does not depend on its value."""

    shards: tuple[nn.Parameter, ...]
    checked_in: int = NEVER

    @classmethod
    def of(cls, model: nn.Module) -> Placed:
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        return cls(tuple(p for p in model.parameters() if isinstance(p, DTensor) and id(p) not in embeddings))

    def versions(self) -> tuple[int, ...]:
        """How often each was changed in place; torch does not count what is done through `.data`."""
        return tuple(shard._version for shard in self.shards)

    def refuse_changed(self, before: tuple[int, ...]) -> None:
        """Compare as a backward begins, and not in its course: an optimizer may step weights as their gradients come."""
        if self.checked_in == current_backward():
            return
        self.checked_in = current_backward()
        changed = zip(self.shards, before, strict=True)
        if any(shard.requires_grad and shard._version != version for shard, version in changed):
            raise UnsupportedError(
                "weights were changed between a forward pass and its backward, which would take gradients at the new ones: "
                "call backward before optimizer.step() or whatever else changes weights"
            )
