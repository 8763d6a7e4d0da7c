"""The installed state of one model: its layers with their modes, its units and head, and the plan in force.

`install.py` fills an `Installed`. Every pass calls `begin`, and `refuse_replaced` raises if modules were exchanged or
settings changed since the model was parallelized.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ithaca.errors import UnsupportedError
from ithaca.handle import Handle
from ithaca.memory.offload import HostStore
from ithaca.memory.replay import Layer, ReplayChain
from ithaca.memory.tiles import Unit
from ithaca.models.layers.head import HeadForward
from ithaca.models.layers.hooks import AROUND_LAYERS, HOOKED_INSIDE, forward_hooked, hooked
from ithaca.models.layers.module_attributes import Assumed
from ithaca.models.planner.plan_in_force import AutoMemory
from ithaca.models.refusals.memory_plans import check_plan
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.sequence.layout import SequenceLayout

logger = logging.getLogger("ithaca")


@dataclass(eq=False)
class Installed:
    """Layers, units and head of one model as installed.

    `stacks`: the lists that hold the decoder layers. `modules`: their modules at installation. `assumed`: settings that
    must not change. `groups`: the number of groups of heads, exchanged one after another.
    """

    handle: Handle
    model: PreTrainedModel
    chain: ReplayChain = field(default_factory=ReplayChain)
    layers: list[Layer] = field(default_factory=list)
    runners: list[Any] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    head: HeadForward | None = None
    store: HostStore | None = None
    auto: AutoMemory | None = None
    stacks: list[nn.ModuleList] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    assumed: Assumed = field(default_factory=Assumed)
    groups: int = 1
    fused: bool = False
    warned: bool = False

    @property
    def tiles_head(self) -> bool:
        return self.head is not None and self.head.reads_weight

    def apply(self, plan: MemoryPlan) -> None:
        """Set the mode of every layer; the plan may change between any two passes."""
        check_plan(self.model, [layer.module for layer in self.layers], plan)
        if any(plan.offload) and self.store is None:
            self.store = HostStore(self.handle.mesh.device)
            if self.auto is not None:
                self.auto.store = self.store
        for layer, runner, mode, away in zip(self.layers, self.runners, plan.layers, plan.offload, strict=True):
            layer.mode, layer.store, runner.keeps = mode, self.store if away else None, mode == "keep"
        for unit in self.units:
            unit.tile = plan.mlp_tile
        if self.head is not None:
            self.head.tile = plan.loss_tile
        self.groups = plan.head_groups

    def begin(self, layout: SequenceLayout | None = None) -> None:
        """Begin a forward pass: unlink the layers, apply the planner's plan for this layout, and check hooks."""
        self.chain.begin()
        if self.auto is not None and layout is not None:
            plan = self.auto.plan_for(layout)
            if plan is not None:
                self.apply(plan)
        if layout is not None:
            self._refuse_hooks_between()
            self._warn_of_hooks_inside()

    def record_modules(self) -> None:
        """Record the modules that must not be exchanged from now on."""
        self.modules = self._modules_now()

    def _modules_now(self) -> list[nn.Module]:
        """Return the layers and their children; with compiled units also the modules inside the children."""
        if self.fused:
            return [module for stack in self.stacks for module in stack.modules()]
        return [module for stack in self.stacks for layer in stack for module in (layer, *layer.children())]

    def refuse_replaced(self) -> None:
        """Raise UnsupportedError if modules were exchanged or their settings changed since the model was parallelized."""
        # A unit calls the modules of its installation: an exchanged MLP would run, and its norm would be skipped.
        what = self._replaced() or self.assumed.changed(self.model)
        if what is not None:
            raise UnsupportedError(
                f"{what} after parallelize: do so before it, or call ithaca.unbind(model) and parallelize it again"
            )

    def _replaced(self) -> str | None:
        now = self._modules_now()
        if now == self.modules:
            return None
        new = set(now) - set(self.modules)
        name = next((key for key, module in self.model.named_modules() if module in new), None)
        return f"{name} was put into the model" if name else "modules were taken out of the model's layers"

    def _refuse_hooks_between(self) -> None:
        """Raise UnsupportedError if a rebuilt layer, or the layer before, has hooks that could change the layer's input."""
        for index, (before, layer) in enumerate(pairwise(self.layers)):
            if layer.mode == "rebuild" and any(hooked(each.module, AROUND_LAYERS) for each in (before, layer)):
                raise UnsupportedError(
                    f"layer {index} or {index + 1} has hooks, and the plan rebuilds the input of layer {index + 1} "
                    "without them: take them off, or pass a MemoryPlan with 'save' or 'recompute' for that layer"
                )

    def _warn_of_hooks_inside(self) -> None:
        replayed = () if self.warned else (each.module for each in self.layers if each.mode != "keep")
        name = next((name for module in replayed if (name := forward_hooked(module)) is not None), None)
        if name is not None:
            self.warned = True
            logger.warning(HOOKED_INSIDE, name)

    def remove(self) -> None:
        """Free host memory; the handle takes the forwards off the modules."""
        if self.store is not None:
            self.store.close()
