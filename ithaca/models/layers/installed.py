"""What runs the decoder layers of one model: the plan in force, layer by layer, and what it was made for.

`install.py` puts it together; a pass asks it to begin, and it refuses a model whose modules were exchanged since then.
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
from ithaca.planning.plan import MemoryPlan
from ithaca.sequence.layout import SequenceLayout

logger = logging.getLogger("ithaca")


@dataclass(eq=False)
class Installed:
    """What runs the layers and the head of one model. `groups`: of heads, exchanged one after another."""

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
    parts: list[nn.Module] = field(default_factory=list)
    assumed: Assumed = field(default_factory=Assumed)
    groups: int = 1
    fused: bool = False
    warned: bool = False

    @property
    def tiles_head(self) -> bool:
        return self.head is not None and self.head.reads_weight

    def apply(self, plan: MemoryPlan) -> None:
        """Put every layer under its mode; between two passes this may change as it likes."""
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
        """A new forward pass: its layers are linked anew, and a plan is made for it where that is left to us."""
        self.chain.begin()
        if self.auto is not None and layout is not None:
            plan = self.auto.plan_for(layout)
            if plan is not None:
                self.apply(plan)
        if layout is not None:
            self._refuse_hooks_between()
            self._warn_of_hooks_inside()

    def note_parts(self) -> None:
        self.parts = self._parts_now()

    def _parts_now(self) -> list[nn.Module]:
        """Of every layer its children, on which units stand; where units are compiled, what is in those too."""
        if self.fused:
            return [module for stack in self.stacks for module in stack.modules()]
        return [module for stack in self.stacks for layer in stack for module in (layer, *layer.children())]

    def refuse_replaced(self) -> None:
        """A unit stands on the modules that were there, a norm hands through to the MLP it had, and on what they did."""
        what = self._replaced() or self.assumed.changed(self.model)
        if what is not None:
            raise UnsupportedError(
                f"{what} after parallelize: do so before it, or call ithaca.unbind(model) and parallelize it again"
            )

    def _replaced(self) -> str | None:
        now = self._parts_now()
        if now == self.parts:
            return None
        new = set(now) - set(self.parts)
        name = next((key for key, module in self.model.named_modules() if module in new), None)
        return f"{name} was put into the model" if name else "modules were taken out of the model's layers"

    def _refuse_hooks_between(self) -> None:
        """A rebuilt input is the output of the layer before: hooks between the two would be passed by."""
        for index, (before, layer) in enumerate(pairwise(self.layers)):
            if layer.mode == "rebuild" and any(hooked(each.module, AROUND_LAYERS) for each in (before, layer)):
                raise UnsupportedError(
                    f"layer {index} or {index + 1} has hooks, and the plan rebuilds the input of layer {index + 1} "
                    "without them: take them off, or pass a MemoryPlan with 'save' or 'recompute' for that layer"
                )

    def _warn_of_hooks_inside(self) -> None:
        again = () if self.warned else (each.module for each in self.layers if each.mode != "keep")
        name = next((name for module in again if (name := forward_hooked(module)) is not None), None)
        if name is not None:
            self.warned = True
            logger.warning(HOOKED_INSIDE, name)

    def remove(self) -> None:
        """Let go of host memory; what was put on modules are steps of the handle."""
        if self.store is not None:
            self.store.close()
