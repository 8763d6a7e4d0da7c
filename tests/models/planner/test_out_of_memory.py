"""Out of memory within a step: the error lists what held the memory and what to change."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.planner.out_of_memory import DeviceMemoryError, out_of_memory
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import Job, MemoryPlan
from ithaca.state.weights.placement import recover
from ithaca.verify.small_models.features import small_batch, small_model
from tests.planning.models import B8
from tests.ranks import run_ranks

LAYERS = 4


def _raise(*args: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation.")


def _plant(layer: nn.Module, where: str) -> Any:
    if where == "forward":
        return layer.mlp.register_forward_pre_hook(_raise)  # type: ignore[union-attr]

    def backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(_raise)

    return layer.self_attn.o_proj.register_forward_hook(backward)  # type: ignore[union-attr]


def _step(where: str, given: bool) -> tuple[str, float, float]:
    mesh = init_mesh(sp=2)
    plan = MemoryPlan(("save",) * LAYERS, (False,) * LAYERS, mlp_tile=5, loss_tile=4)
    model = parallelize(small_model("llama", num_hidden_layers=LAYERS), mesh, memory=plan if given else "auto")
    batch = small_batch(1, 24)
    before = causal_loss(model, batch, mesh).item()
    handle = _plant(model.model.layers[1], where)
    try:
        causal_loss(model, batch, mesh).backward()
    except DeviceMemoryError as error:
        message = str(error)
    handle.remove()
    recover(model)
    again = causal_loss(model, batch, mesh)
    again.backward()
    return message, before, again.item()


# Layers that are run again tell by themselves; where there is room for everything, the loss's own backward does.
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_error_lists_terms(where: str, given: bool) -> None:
    for message, before, again in run_ranks(2, _step, where, given):
        lines = message.splitlines()
        assert lines[0] == "CUDA out of memory. Tried to allocate 2.00 GiB."
        assert "Held now: weights " in message
        assert "gradients " in message
        assert "The plan in force (" in message
        assert "The largest term is '" in message
        # A plan that was given whole goes by no budget.
        first = "memory='auto' and " if given else ""
        change = f"The smallest change: {first}parallelize(..., memory_budget="
        assert change in message or "any one of these fits" in message
        assert message.count("Held now") == 1, "one account, however many layers it went through"
        assert again == before, "the step after it is right"


def test_out_of_memory_smallest_plan_names_other_remedies() -> None:
    """The planner takes the device's memory for enough, so more of it is no remedy."""
    job, layers = Job(1024 * 1024, optimizer="none"), len(B8.layers)
    least = MemoryPlan(("recompute",) * layers, (True,) * layers, mlp_tile=2048, loss_tile=1024, head_groups=8)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    message = str(out_of_memory(error, nn.Linear(2, 2), B8, job, least, 10**9))
    assert "any one of these fits" in message
    assert message.endswith("; a larger device")
    assert "of device memory" not in message


def test_loss_without_backward_is_freed() -> None:
    """A reference cycle would keep the graph's tensors alive until the garbage collector runs."""
    assert run_ranks(1, _freed) == [True]


def _freed() -> bool:
    mesh = init_mesh(sp=1)
    model = parallelize(small_model("llama"), mesh)
    gc.disable()
    try:
        loss = causal_loss(model, small_batch(1, 24), mesh)
        held = weakref.ref(loss)
        del loss
        return held() is None
    finally:
        gc.enable()
