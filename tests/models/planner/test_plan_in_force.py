"""Inputs of a plan: free host memory, the job's own state on the host, and the layers of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from ithaca.constants import GIB
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.planner import plan_in_force
from ithaca.models.planner.loaded_sizes import loaded_sizes
from ithaca.models.planner.plan_in_force import MOST, SHARE, AutoMemory, planner_of
from ithaca.models.support import ModelParts
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import Job
from ithaca.planning.search.phrases import LIBRARY
from ithaca.state.optimizer.build import build_optimizer
from ithaca.state.optimizer.on_host import held_on_host
from ithaca.verify.small_models.features import small_batch, small_model
from ithaca.verify.small_models.types import survey_config
from tests.ranks import run_ranks


def _held_through_a_step() -> list[int]:
    mesh = init_mesh(sp=1)
    model = parallelize(small_model("llama"), mesh, optimizer="adamw")
    optimizer = build_optimizer(model, "adamw", lr=1e-3)
    held = [held_on_host(model)]
    causal_loss(model, small_batch(1, 12), mesh).backward()
    held.append(held_on_host(model))
    optimizer.step()
    optimizer.zero_grad()
    planner: Any = planner_of(model)
    held.append(planner.held())
    del optimizer
    return [*held, held_on_host(model), sum(p.nbytes for p in model.parameters())]


def test_host_budget_state_of_job_is_counted() -> None:
    [(before, with_gradients, with_state, without, weights)] = run_ranks(1, _held_through_a_step)
    assert (before, with_gradients, without) == (weights, 2 * weights, weights)
    # Two moments and a step count for each weight.
    assert 3 * weights <= with_state < 3.1 * weights


def test_host_budget_before_and_after_state_is_equal() -> None:
    model: Any = torch.nn.Linear(2, 2)
    job = Job(length=1, weights_on_host=True, gradients_on_host=True, optimizer_on_host=True)
    mesh: Any = SimpleNamespace(local_ranks=2)
    planner = AutoMemory(small_sizes(), mesh, job, 1, model)
    total, taken = 200_000, 0
    free = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=total - taken))
    with patch.object(plan_in_force, "psutil", free):
        assert planner._host() == SHARE * total / 2
        # Both ranks of the host have put 30,000 bytes of state there, and 5,000 of saved tensors.
        taken, planner.held = 70_000, lambda: 30_000
        store: Any = SimpleNamespace(pinned=5_000)
        planner.store = store
        assert planner._host() == SHARE * total / 2
        planner.host_budget = 4_000
        assert planner._host() == 4_000
        # More than the usual share, if asked for; never all there is.
        planner.host_budget = 90_000
        assert planner._host() == 90_000
        planner.host_budget = 99_000
        assert planner._host() == MOST * total / 2


def _told_budgets() -> list[Any]:
    mesh, planners = init_mesh(sp=1), []
    for host in ("3GB", 7e9, None):
        model: Any = parallelize(small_model("llama"), mesh, memory_budget="2GB", host_budget=host)
        planners.append(planner_of(model))
    return [(planner.budget, planner.host_budget) for planner in planners if planner is not None]


def test_parallelize_budgets_reach_planner() -> None:
    [told] = run_ranks(1, _told_budgets)
    assert told == [(2 * 10**9, 3 * 10**9), (2 * 10**9, 7 * 10**9), (2 * 10**9, None)]


def test_phrases_larger_need_names_setting_or_machine() -> None:
    """A plan gets three quarters of a device by default; a setting may raise the share, up to a limit."""
    model: Any = torch.nn.Linear(2, 2)
    mesh: Any = SimpleNamespace(local_ranks=4, device=torch.device("cuda"))
    planner = AutoMemory(small_sizes(), mesh, Job(length=1), 60 * GIB, model)
    free = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=400 * GIB))
    with patch.object(plan_in_force, "psutil", free), patch.object(plan_in_force, "_device_memory", lambda _: 80 * GIB):
        said: Any = planner._here(LIBRARY)
        assert said.device(70) == "parallelize(..., memory_budget='70GiB')"
        assert said.device(90) == "a device of 120 GiB"
        assert said.host(90) == "parallelize(..., host_budget='90GiB')"
        assert said.host(94) == "502 GiB of free host memory"
        mesh.device = torch.device("cpu")
        assert planner._here(LIBRARY).host is None


def small_sizes() -> Any:
    model = small_model("llama")
    return loaded_sizes(ModelParts.of(model))


def test_loaded_sizes_n_inner_is_mlp_width() -> None:
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_inner=96, vocab_size=64, n_positions=32)
    model = GPT2LMHeadModel(config)
    assert loaded_sizes(ModelParts.of(model)).layers[0].width == 96


def _layers_run_several_times() -> int:
    mesh = init_mesh(sp=1)
    model: Any = parallelize(AutoModelForCausalLM.from_config(survey_config("hrm_text")), mesh)
    causal_loss(model, {"input_ids": torch.arange(3, 35)[None]}, mesh).backward()
    planner: Any = planner_of(model)
    return len(planner.plan.layers)


def test_plan_layers_run_several_times_are_counted_once() -> None:
    """hrm_text's config counts a layer once for every run in a pass."""
    assert run_ranks(1, _layers_run_several_times) == [4]


@pytest.mark.parametrize(("kind", "normed"), [("exaone4", True), ("qwen3", True), ("olmo2", True), ("llama", False)])
def test_loaded_sizes_norms_of_heads_are_found(kind: str, normed: bool) -> None:
    model = small_model(kind)
    sizes = loaded_sizes(ModelParts.of(model))
    heads = (sizes.heads + sizes.kv_heads) * sizes.key_size
    assert {layer.normed for layer in sizes.layers} == {heads if normed else 0}
