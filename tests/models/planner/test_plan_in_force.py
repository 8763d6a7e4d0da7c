"""What a plan goes by: the host's memory with what the job itself has put there, and the layers that are there."""

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
from ithaca.models.planner.loaded_sizes import sizes_of
from ithaca.models.planner.plan_in_force import MOST, SHARE, AutoMemory, planner_of
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


def test_what_the_job_holds_on_the_host_is_counted_as_it_comes() -> None:
    [(before, with_gradients, with_state, without, weights)] = run_ranks(1, _held_through_a_step)
    assert (before, with_gradients, without) == (weights, 2 * weights, weights)
    # Two moments and a step count for each weight.
    assert 3 * weights <= with_state < 3.1 * weights


def test_a_plan_has_the_same_room_before_and_after_its_state_is_there() -> None:
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


def test_budgets_reach_the_planner() -> None:
    [told] = run_ranks(1, _told_budgets)
    assert told == [(2 * 10**9, 3 * 10**9), (2 * 10**9, 7 * 10**9), (2 * 10**9, None)]


def test_a_refusal_asks_for_what_the_machine_needs() -> None:
    """Of which a plan is given three quarters; and where the device has more than that, for more of it."""
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
    return sizes_of(model, model)


def test_a_width_of_its_own_is_planned() -> None:
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_inner=96, vocab_size=64, n_positions=32)
    model = GPT2LMHeadModel(config)
    assert sizes_of(model, model).layers[0].width == 96


def _layers_run_several_times() -> int:
    mesh = init_mesh(sp=1)
    model: Any = parallelize(AutoModelForCausalLM.from_config(survey_config("hrm_text")), mesh)
    causal_loss(model, {"input_ids": torch.arange(3, 35)[None]}, mesh).backward()
    planner: Any = planner_of(model)
    return len(planner.plan.layers)


def test_layers_are_counted_as_they_are_there() -> None:
    """A config may count a layer as often as it runs in a pass."""
    assert run_ranks(1, _layers_run_several_times) == [4]


@pytest.mark.parametrize(("kind", "normed"), [("exaone4", True), ("qwen3", True), ("olmo2", True), ("llama", False)])
def test_norms_of_heads_are_found_where_they_are(kind: str, normed: bool) -> None:
    model = small_model(kind)
    sizes = sizes_of(model, model)
    heads = (sizes.heads + sizes.kv_heads) * sizes.key_size
    assert {layer.normed for layer in sizes.layers} == {heads if normed else 0}
