"""Refusal of memory plans that do not fit a model, and of models whose layers cannot be recomputed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from ithaca.errors import UnsupportedError
from ithaca.models.layers.units import router_of
from ithaca.models.refusals.calls import refuse_checkpointing
from ithaca.models.support import ModelParts, memory_refusal
from ithaca.planning.memory_plan import Decisions, LayerMode, MemoryPlan


def plan_for(
    parts: ModelParts, memory: MemoryPlan | Decisions | None, *, allow_untested: bool
) -> MemoryPlan | Decisions | None:
    """Return the plan or decisions for the model's layers; None for a model that must stay without memory modes.

    A plan, or decisions, that the model cannot take are refused.
    """
    if memory is None:
        return None
    base, layers = parts.base, parts.layers
    decided = isinstance(memory, MemoryPlan) or bool(memory.names)
    if decided and not layers:
        raise UnsupportedError(f"{type(base).__name__} does not name its layers, so no plan fits it: use memory=None")
    refused = None if allow_untested else memory_refusal(base)
    if refused and decided:
        raise UnsupportedError(f"layers run again are not exact for {refused}: use memory=None or 'auto'")
    if isinstance(memory, MemoryPlan):
        check_plan(base, layers, memory)
    elif decided:
        check_modes(base, layers, memory.for_layers(len(layers)).modes(len(layers)) or ())
    if refused:
        return None
    refuse_checkpointing(base)
    return memory


def check_plan(model: PreTrainedModel, layers: list[nn.Module], plan: MemoryPlan) -> None:
    """Refuse a plan with another number of layers, or with modes that this model cannot take."""
    if len(plan.layers) != len(layers):
        raise UnsupportedError(
            f"the memory plan has {len(plan.layers)} layers, the model {len(layers)}: give one mode a layer"
        )
    check_modes(model, layers, plan.layers)


def check_modes(model: PreTrainedModel, layers: list[nn.Module], modes: Sequence[LayerMode]) -> None:
    """Refuse the mode "rebuild" for layers with experts."""
    if "rebuild" in modes and any(router_of(model, layer)[0] is not None for layer in layers):
        # Sums over experts are not deterministic bit by bit, so a rebuilt input could choose other experts.
        raise UnsupportedError("inputs cannot be rebuilt through expert layers: use 'save' or 'recompute' instead")
