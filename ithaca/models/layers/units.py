"""What a unit runs on a tile: its children one after another, compiled or not, and its router's logits at the end; and
its gradients without its value, where it is compiled and ends in a product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from transformers import PreTrainedModel

from ithaca.memory.replay_guard import ModuleSnapshot, adapters_now
from ithaca.models.discover.roles import UnitRole
from ithaca.models.layers.fuse import Chain as CompiledChain
from ithaca.models.layers.fuse import WayBack, compiled_chain, compiled_way_back, weights_of
from ithaca.models.layers.hooks import hooked_inside


@dataclass(frozen=True, slots=True)
class Split:
    """A unit whose output is that of the module `end` inside its main child: what goes in there, and the way back."""

    end: str
    before: CompiledChain
    way_back: WayBack


@dataclass(frozen=True, slots=True)
class Fused:
    """A unit's compiled code, shared by all layers of the same shape and settings."""

    whole: CompiledChain
    split: Split | None
    adapters: tuple[Any, ...] = ()

    @classmethod
    def of(cls, layer: nn.Module, role: UnitRole) -> Fused:
        whole, adapters = compiled_chain(role.children(layer)), adapters_now(adapted(role.children(layer)))
        if role.end is None:
            return cls(whole, None, adapters)
        until = role.until_main(layer)
        back = compiled_way_back(until[-1].get_submodule(role.end))
        return cls(whole, Split(role.end, compiled_chain(until, before=role.end), back), adapters)


@dataclass(eq=False)
class UnitForward:
    """The unit's children one after another on a tile, with the router's logits last where there is a router.

    Where something hangs on one of its modules that a tile or a compiled graph would miss, the unit is no unit: each
    child is the module it was.
    """

    children: list[nn.Module]
    forwards: list[Callable[[Tensor], Any]]
    router: nn.Module | None
    index: int
    fused: Fused | None = None

    def __post_init__(self) -> None:
        self.adapted = adapted(self.children)

    def __call__(self, x_BtC: Tensor) -> Any:
        if self.fused is not None and self.as_compiled:
            return self.fused.whole(weights_of(self.children), x_BtC)
        return self._run(self.forwards, x_BtC)

    @property
    def as_compiled(self) -> bool:
        """Whether its adapters are on, off and scaled as they were when it was compiled."""
        return self.fused is not None and adapters_now(self.adapted) == self.fused.adapters

    def alone(self, child: nn.Module, x_BLC: Tensor) -> Any:
        """One child on all tokens."""
        return self._run([self.forwards[self.children.index(child)]], x_BLC)

    @property
    def apart(self) -> bool:
        """Whether its modules or weights have hooks or a child another forward, which may come at any time."""
        for child in self.children:
            if getattr(child.__dict__.get("forward"), "own", None) is not self:
                return True
            if hooked_inside(child):
                return True
        return False

    def _run(self, forwards: list[Callable[[Tensor], Any]], x_BtC: Tensor) -> Any:
        logits: list[Tensor] = []
        handle = None
        if self.router is not None:
            handle = self.router.register_forward_hook(lambda module, args, output: logits.append(output[self.index]))
        try:
            given: Any = x_BtC
            for forward in forwards:
                given = forward(given)
        finally:
            if handle is not None:
                handle.remove()
        return (*(given if isinstance(given, tuple) else (given,)), *logits)

    def parameters(self) -> list[nn.Parameter]:
        """Each once, or two children's weight would have its gradient twice. A method and no closure: a copy of the
        model has its own."""
        return list(dict.fromkeys(p for child in self.children for p in child.parameters()))

    def note(self) -> ModuleSnapshot:
        return ModuleSnapshot.of(self.children)


@dataclass(eq=False)
class UnitBackward:
    """A tile's gradients, without the value of what the unit ends in. `children`: those up to the main one; what comes
    after hands its value through. `own`: the unit, which is run where it is no longer what was compiled."""

    children: list[nn.Module]
    split: Split
    own: UnitForward

    def __call__(self, x_BtC: Tensor, dout_BtC: Tensor) -> list[Tensor | None]:
        """The input's gradient first if it wants one, then those of the parameters that do."""
        if not self.own.as_compiled:
            with torch.enable_grad():
                (out_BtC,) = self.own(x_BtC)
            inputs = [x for x in (x_BtC, *self.own.parameters()) if x.requires_grad]
            return list(torch.autograd.grad([out_BtC], inputs, [dout_BtC], allow_unused=True))
        with torch.enable_grad():
            wide_BtF = self.split.before(weights_of(self.children), x_BtC)
        last = self.children[-1].get_submodule(self.split.end)
        found, dwide_BtF = self._last(last, wide_BtF.detach(), dout_BtC)
        wanted = [p for child in self.children for p in child.parameters() if p.requires_grad]
        inputs = [x for x in (x_BtC, *wanted) if x.requires_grad and x not in found]
        if inputs:
            # The edge is enough to start from: the value is not held while its gradient goes back.
            edge = get_gradient_edge(wide_BtF)
            del wide_BtF
            found |= dict(zip(inputs, torch.autograd.grad([edge], inputs, [dwide_BtF], allow_unused=True), strict=True))
        return [found[x] for x in (x_BtC, *wanted) if x.requires_grad]

    def _last(self, last: nn.Module, wide_BtF: Tensor, dout_BtC: Tensor) -> tuple[dict[Tensor, Tensor | None], Tensor]:
        """Gradients of the last module's parameters, and of what goes in."""
        weights = {name: weight.detach() for name, weight in weights_of([last])[0].items()}
        trained = {name: p for name, p in last.named_parameters() if p.requires_grad}
        others = {name: weight for name, weight in weights.items() if name not in trained}
        given, dwide_BtF = self.split.way_back({name: weights[name] for name in trained}, others, wide_BtF, dout_BtC)
        return {p: given[name] for name, p in trained.items()}, dwide_BtF


def adapted(children: list[nn.Module]) -> list[Any]:
    """PEFT's layers in them."""
    return [module for child in children for module in child.modules() if hasattr(module, "base_layer")]


def router_of(model: PreTrainedModel, main: nn.Module) -> tuple[nn.Module | None, int]:
    """The module whose output transformers records as router logits, and where in that output they stand."""
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits")
    target = getattr(recorder, "target_class", recorder)
    if not isinstance(target, type):
        return None, 0
    router = next((m for m in main.modules() if isinstance(m, target)), None)
    return router, int(getattr(recorder, "index", 0))
