"""Refusal of sharded weights that change between a forward pass and its backward.

autograd refuses a backward through weights that were changed in place since forward. FSDP2 gathers weights anew in
backward, and autograd sees tensors that nobody has changed: gradients at the new weights from activations of the old
ones. So the version counters of the shards are read when a forward pass ends, and compared when its backward begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from ithaca.errors import UnsupportedError
from ithaca.models.reduction_marks import NEVER, current_backward


@dataclass(eq=False, slots=True)
class WeightVersions:
    """Version counters of the shards of one model."""

    shards: tuple[nn.Parameter, ...]
    checked_in: int = NEVER

    @classmethod
    def of(cls, model: nn.Module) -> WeightVersions:
        # An embedding's gradient does not depend on its weight's value.
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        return cls(tuple(p for p in model.parameters() if isinstance(p, DTensor) and id(p) not in embeddings))

    def now(self) -> tuple[int, ...]:
        """Return how often each shard was changed in place; torch does not count changes through `.data`."""
        return tuple(shard._version for shard in self.shards)

    def refuse_changed(self, before: tuple[int, ...]) -> None:
        """Refuse trained shards whose version is not that of `before`."""
        # Once, as a backward begins: an optimizer may step weights while their gradients come.
        if self.checked_in == current_backward():
            return
        self.checked_in = current_backward()
        changed = zip(self.shards, before, strict=True)
        if any(shard.requires_grad and shard._version != version for shard, version in changed):
            raise UnsupportedError(
                "weights were changed between a forward pass and its backward, which would take gradients at the new ones: "
                "call backward before optimizer.step() or whatever else changes weights"
            )
