"""What a unit runs on a tile: its children one after another, compiled or not, and its router's logits at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ithaca.models.fuse import Chain as CompiledChain
from ithaca.models.fuse import weights_of


@dataclass(eq=False)
class UnitForward:
    """The unit's children one after another on a tile, with the router's logits last where there is a router."""

    children: list[nn.Module]
    forwards: list[Callable[[Tensor], Any]]
    router: nn.Module | None
    index: int
    fused: CompiledChain | None = None

    def __call__(self, x_BtC: Tensor) -> Any:
        if self.fused is not None:
            return self.fused(weights_of(self.children), x_BtC)
        logits: list[Tensor] = []
        handle = None
        if self.router is not None:
            handle = self.router.register_forward_hook(lambda module, args, output: logits.append(output[self.index]))
        try:
            given: Any = x_BtC
            for forward in self.forwards:
                given = forward(given)
        finally:
            if handle is not None:
                handle.remove()
        return (*(given if isinstance(given, tuple) else (given,)), *logits)


def router_of(model: PreTrainedModel, main: nn.Module) -> tuple[nn.Module | None, int]:
    """The module whose output transformers records as router logits, and where in that output they stand."""
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits")
    target = getattr(recorder, "target_class", recorder)
    if not isinstance(target, type):
        return None, 0
    router = next((m for m in main.modules() if isinstance(m, target)), None)
    return router, int(getattr(recorder, "index", 0))
