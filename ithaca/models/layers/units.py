"""The computation of a unit on one tile: forward, with the router's logits last, and backward without the last product.

UnitForward   x_BtC -> norm -> MLP -> out_BtC        compiled as one function, or child by child
UnitBackward  x_BtC, dout_BtC -> gradients           for compiled units that end in a matrix product:
                                                     recompute up to the product, then backward through it
"""

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
from ithaca.models.layers.fuse import ModuleBackward, compiled_backward, compiled_chain, weights_of
from ithaca.models.layers.hooks import hooked_inside


@dataclass(frozen=True, slots=True)
class Split:
    """Compiled code of a unit that ends in a matrix product, cut before that product.

    `end`: the path of the product's module inside the main child. `before`: everything up to the module's input.
    `backward`: the module's backward.
    """

    end: str
    before: CompiledChain
    backward: ModuleBackward


@dataclass(frozen=True, slots=True)
class Fused:
    """A unit's compiled code, shared by all layers of the same shapes and settings.

    `adapters`: the state of the unit's adapters (on, off, scale) when the code was compiled.
    """

    whole: CompiledChain
    split: Split | None
    adapters: tuple[Any, ...] = ()

    @classmethod
    def of(cls, layer: nn.Module, role: UnitRole) -> Fused:
        whole, adapters = compiled_chain(role.children(layer)), adapters_now(adapted(role.children(layer)))
        if role.end is None:
            return cls(whole, None, adapters)
        until = role.until_main(layer)
        back = compiled_backward(until[-1].get_submodule(role.end))
        return cls(whole, Split(role.end, compiled_chain(until, before=role.end), back), adapters)


@dataclass(eq=False)
class UnitForward:
    """Runs the unit's children one after another on a tile, with the router's logits last if there is a router.

    Hooks on the children would miss tiles and compiled code: `runs_separately` is then True, and each child runs by
    itself on all tokens.
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
        """True if the adapters are on, off and scaled as when the code was compiled."""
        return self.fused is not None and adapters_now(self.adapted) == self.fused.adapters

    def run_child(self, child: nn.Module, x_BLC: Tensor) -> Any:
        """Run one child on all tokens."""
        return self._run([self.forwards[self.children.index(child)]], x_BLC)

    @property
    def runs_separately(self) -> bool:
        """True if a module or weight of the unit has hooks, or a child has another forward than ours."""
        # Checked in every pass: users may register hooks at any time.
        for child in self.children:
            if getattr(child.__dict__.get("forward"), "unit_forward", None) is not self:
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
        """Return the children's parameters, each once."""
        # Each once: a weight that two children share must not get its gradient twice. A method rather than a closure: a
        # deep copy of the model must return its own parameters.
        return list(dict.fromkeys(p for child in self.children for p in child.parameters()))

    def snapshot(self) -> ModuleSnapshot:
        """Return the state of the children that a replay compares with."""
        return ModuleSnapshot.of(self.children)


@dataclass(eq=False)
class UnitBackward:
    """Computes a tile's gradients without computing the unit's last product.

    `children`: the unit's children up to the main one; later children return their input. `forward`: the whole unit,
    which runs instead if adapters have changed since compilation.
    """

    children: list[nn.Module]
    split: Split
    forward: UnitForward

    def __call__(self, x_BtC: Tensor, dout_BtC: Tensor) -> list[Tensor | None]:
        """Return the gradients of the input and of the parameters, in this order, of those that require one."""
        if not self.forward.as_compiled:
            with torch.enable_grad():
                (out_BtC,) = self.forward(x_BtC)
            inputs = [x for x in (x_BtC, *self.forward.parameters()) if x.requires_grad]
            return list(torch.autograd.grad([out_BtC], inputs, [dout_BtC], allow_unused=True))
        with torch.enable_grad():
            wide_BtF = self.split.before(weights_of(self.children), x_BtC)
        last = self.children[-1].get_submodule(self.split.end)
        gradients, dwide_BtF = self._last_gradients(last, wide_BtF.detach(), dout_BtC)
        trained_parameters = [p for child in self.children for p in child.parameters() if p.requires_grad]
        inputs = [x for x in (x_BtC, *trained_parameters) if x.requires_grad and x not in gradients]
        if inputs:
            # Backward can start from the graph edge, so the activation is freed before its gradient is computed.
            edge = get_gradient_edge(wide_BtF)
            del wide_BtF
            gradients |= dict(
                zip(inputs, torch.autograd.grad([edge], inputs, [dwide_BtF], allow_unused=True), strict=True)
            )
        return [gradients[x] for x in (x_BtC, *trained_parameters) if x.requires_grad]

    def _last_gradients(
        self, last: nn.Module, wide_BtF: Tensor, dout_BtC: Tensor
    ) -> tuple[dict[Tensor, Tensor | None], Tensor]:
        """Return the gradients of the last module's trained parameters, and of its input."""
        weights = {name: weight.detach() for name, weight in weights_of([last])[0].items()}
        trained = {name: p for name, p in last.named_parameters() if p.requires_grad}
        others = {name: weight for name, weight in weights.items() if name not in trained}
        dweights, dwide_BtF = self.split.backward({name: weights[name] for name in trained}, others, wide_BtF, dout_BtC)
        return {p: dweights[name] for name, p in trained.items()}, dwide_BtF


def adapted(children: list[nn.Module]) -> list[Any]:
    """Return PEFT's wrapper layers inside the children."""
    return [module for child in children for module in child.modules() if hasattr(module, "base_layer")]


def router_of(model: PreTrainedModel, main: nn.Module) -> tuple[nn.Module | None, int]:
    """Return the module whose output transformers records as router logits, and the logits' index in that output."""
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits")
    target = getattr(recorder, "target_class", recorder)
    if not isinstance(target, type):
        return None, 0
    router = next((m for m in main.modules() if isinstance(m, target)), None)
    return router, int(getattr(recorder, "index", 0))
