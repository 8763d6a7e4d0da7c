"""Adapters that are switched or scaled after the first step, or differ by layer: compiled code follows the change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.binding_state import unsharded
from ithaca.models.layers import fuse
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import LayerMode, MemoryPlan
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import run_ranks
from tests.tolerances import COMPILED

TARGETS = ["gate_proj", "up_proj", "down_proj", "q_proj"]
MODES: list[LayerMode] = ["keep", "save"]


def lora(**settings: Any) -> Any:
    """A model with two adapters, the first of them on; both do something."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, lora_dropout=0.0, **settings
    )
    model: Any = get_peft_model(small_model("llama", dtype=torch.float32), config)
    model.add_adapter("other", config)
    return model


def as_it_is(model: Any) -> None:
    """The adapter that it was compiled with."""


def off(model: Any) -> None:
    model.disable_adapter_layers()


def other(model: Any) -> None:
    model.set_adapter("other")


def rescaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.scaling["default"] = 0.5


def merged(model: Any) -> None:
    model.merge_adapter()


CHANGES: list[Callable[[Any], None]] = [as_it_is, off, other, rescaled, merged]


def steps(change: Callable[[Any], None], settings: dict[str, Any], mode: LayerMode) -> list[float]:
    """Return errors of loss and gradients against plain PEFT before a change and after it, and a whole pass after it."""
    mesh, batch = init_mesh(sp=1), small_batch(1, 20)
    # Dynamo fixes a module's attributes in its graph whatever it is compiled with.
    real = torch.compile
    with patch.object(fuse.torch, "compile", lambda function: real(function, backend="eager")):
        plain, model = lora(**settings), parallelize(lora(**settings), mesh, memory=plan(mode), fuse=True)
        worst = [step(plain, model, batch, mesh)]
        change(plain)
        change(model)
        worst.append(step(plain, model, batch, mesh))
        with torch.no_grad(), unsharded(model):
            worst.append(abs(float(model(**batch).loss - plain(**batch).loss)))
        return worst


def plan(mode: LayerMode) -> MemoryPlan:
    return MemoryPlan(("keep", mode), (False, False), 8, 8)


def step(plain: Any, model: Any, batch: Any, mesh: Any) -> float:
    plain.zero_grad()
    model.zero_grad()
    expected, got = plain(**batch).loss, causal_loss(model, batch, mesh)
    worst = abs(float(got.detach() - expected.detach()))
    if not expected.requires_grad:
        return worst
    expected.backward()
    got.backward()
    for (name, own), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            worst = max(worst, float((own.grad - wanted.grad).abs().max() / wanted.grad.abs().max().clamp(min=1e-3)))
    return worst


# The two that compiled code would not see by itself, in the quick run in one mode.
CASES = [
    pytest.param(change, mode, marks=() if change in (off, other) and mode == "save" else pytest.mark.slow)
    for change in CHANGES
    for mode in MODES
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("change", "mode"), CASES)
def test_switched_adapter_changes_loss_as_in_peft(change: Callable[[Any], None], mode: LayerMode) -> None:
    [worst] = run_ranks(1, steps, change, {}, mode)
    assert max(worst) < COMPILED


@pytest.mark.slow
def test_layers_of_one_shape_keep_own_adapter_scaling() -> None:
    [worst] = run_ranks(1, steps, as_it_is, {"alpha_pattern": {"layers.1.mlp.down_proj": 64}}, "save")
    assert max(worst) < COMPILED
