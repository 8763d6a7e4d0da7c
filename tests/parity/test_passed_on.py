"""Layers that share keys and values, and layers in stacks: every memory mode, mixtures and plans made for a tight budget."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest

from ithaca.errors import UnsupportedError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.binding_state import binding_of
from ithaca.models.planner.memory_planner import planner_of
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import Decisions, LayerMode, MemoryPlan
from ithaca.planning.search.advice import plan_or_refuse
from ithaca.planning.search.choose import feasible
from ithaca.planning.terms.memory_terms import memory_of
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.parity import compare, gradient_errors
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import build, small_batch
from ithaca.verify.small_models.types import survey_config
from ithaca.verify.small_models.variants import features_on
from tests.batches import micro_batches
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

K: LayerMode = "keep"
S: LayerMode = "save"
R: LayerMode = "recompute"
B: LayerMode = "rebuild"
# The last two of four layers read what the first two leave: readers and writers under every pair of modes.
MIXED: tuple[tuple[LayerMode, ...], ...] = (
    (K, K, K, K), (S, S, S, S), (R, R, R, R), (S, K, S, K), (K, S, K, S), (K, K, S, R), (S, R, K, K), (K, S, R, S),
)  # fmt: skip
REBUILT: tuple[tuple[LayerMode, ...], ...] = ((S, B, B, B), (R, B, S, B), (K, S, B, B), (S, B, K, R))
# Experts choose again where inputs are rebuilt, which is refused.
DENSE = {"enable_moe_block": False}


def small(kind: str, **settings: Any) -> Any:
    return build(survey_config(kind, **(features_on(kind) | settings)))


def errors(kind: str, sp: int, plans: tuple[tuple[LayerMode, ...], ...], settings: dict[str, Any]) -> list[float]:
    mesh, batches = init_mesh(sp=sp), micro_batches(1, 2, ["plain", "packed"])
    found = []
    for modes in plans:
        plan = MemoryPlan(modes, tuple(mode != "keep" for mode in modes), 5, 7)
        found.append(compare(small(kind, **settings), batches, mesh, memory=plan).worst)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "settings", "plans"),
    [
        ("gemma4_unified_text", {}, ((R, R, R, R), (K, S, R, S), (K, S, B, B))),
        ("gemma4_unified_text", {}, (*MIXED, *REBUILT)),
        pytest.param("gemma4_text", {"enable_moe_block": True}, MIXED, marks=pytest.mark.slow),
        ("gemma4_text", DENSE, REBUILT),
        ("hrm_text", {}, ((S, B, S, B), (R, B, S, S))),
        pytest.param("hrm_text", {}, (*MIXED, (K, S, R, B), (S, B, K, S)), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sp", [2, 1])
def test_linked_layers_memory_modes_equal_one_process(
    kind: str, settings: dict[str, Any], plans: tuple[tuple[LayerMode, ...], ...], sp: int
) -> None:
    for ranks in run_ranks(sp, errors, kind, sp, plans, settings):
        assert max(ranks) < FP64, dict(zip(plans, ranks, strict=True))


def tight(kind: str, settings: dict[str, Any], share: float) -> tuple[float, str]:
    """memory="auto" with a budget between what the largest and the smallest plan take: the error, and the plan."""
    mesh, batch = init_mesh(sp=1), small_batch(2, 600)
    planner = planner_of(parallelize(small(kind, **settings), mesh, memory={"mlp_tile": 64, "offload": False}))
    assert planner is not None
    job, sizes = replace(planner.job, length=600, batch=2), planner.sizes
    count = len(sizes.layers)
    plans = {mode: MemoryPlan((mode,) * count, (False,) * count, 64, 256) for mode in (K, R)}
    most, least = (memory_of(sizes, job, plans[mode]).device_bytes for mode in (K, R))
    budget = int(least + share * (most - least))
    made = []

    def prepare(model: Any, mesh: Any, **options: Any) -> Any:
        made.append(parallelize(model, mesh, **options))
        return made[-1]

    memory = {"mlp_tile": 64, "loss_tile": 256, "offload": False}
    worst = compare(
        small(kind, **settings), [[batch]], mesh, prepare=prepare, memory=memory, memory_budget=budget
    ).worst
    plan = planner_of(made[0]).plan  # type: ignore[union-attr]
    assert plan is not None
    return worst, plan.summary()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "settings"), [("gemma4_unified_text", {}), ("gemma4_text", {"enable_moe_block": True}), ("hrm_text", {})]
)
def test_linked_layers_tight_budget_equal_one_process(kind: str, settings: dict[str, Any]) -> None:
    worst, summary = run_ranks(1, tight, kind, settings, 0.5)[0]
    assert worst < FP64
    assert "save" in summary or "recompute" in summary, summary
    if kind == "hrm_text":
        assert "rebuild" not in summary


def unlinked() -> list[str]:
    found = []
    for modes in ((S, S, B, S), (S, B, B, B)):
        for memory in ({"layers": modes}, MemoryPlan(modes, (False,) * 4, 5, 7)):
            with pytest.raises(UnsupportedError) as caught:
                parallelize(small("hrm_text"), init_mesh(sp=1), memory=memory)
            found.append(str(caught.value))
    return found


def test_rebuild_at_the_start_of_a_stack_is_refused() -> None:
    for said in run_ranks(1, unlinked)[0]:
        assert re.match(r"layer 2 cannot be under 'rebuild': its input is not the output of the layer before it", said)


def planned(linked: bool) -> tuple[bool, set[str]]:
    """Whether hrm_text's layers are known as linked, and modes of all plans made where more or less fits."""
    planner = planner_of(parallelize(small("hrm_text"), init_mesh(sp=1)))
    assert planner is not None
    sizes, job = replace(planner.sizes, linked=linked), replace(planner.job, length=4096)
    decided = Decisions(mlp_tile=64, loss_tile=256, head_groups=1)
    least = memory_of(sizes, job, MemoryPlan((R,) * 4, (False,) * 4, 64, 256)).device_bytes
    budgets = [int(least * (1 + share / 50)) for share in range(50)]
    plans = [plan_or_refuse(sizes, job, each, 0, decided) for each in budgets if feasible(sizes, decided, job, each, 0)]
    return planner.sizes.linked, {mode for plan in plans for mode in plan.layers}


def test_plan_of_unlinked_layers_has_no_rebuild() -> None:
    linked, modes = run_ranks(1, planned, False)[0]
    assert not linked
    assert modes == {"keep", "save", "recompute"}
    assert "rebuild" in run_ranks(1, planned, True)[0][1], "else there would be such plans"


def doubled(model: Any) -> Any:
    """The first layer's output is another tensor than the one it gave."""
    first = model.model.layers[0]
    forward = first.forward
    first.__dict__["forward"] = lambda *args, **kwargs: forward(*args, **kwargs) * 2
    return model


def broken_later(by_hand: bool) -> float:
    """Something between two layers that was not there when the model was parallelized."""
    model, batch, mesh = build(survey_config("llama", num_hidden_layers=3)), small_batch(2, 24), init_mesh(sp=1)
    with compute_in_fp64():
        expected = reference(doubled(copy.deepcopy(model)), [[batch]])
        parallel: Any = parallelize(model, mesh, memory={"layers": (S, B, B), "offload": False, "mlp_tile": 5})
        memory: Any = binding_of(parallel).memory
        memory.chain.strict = by_hand
        causal_loss(doubled(parallel), batch, mesh).backward()
    return max(gradient_errors(parallel, expected.gradients).values())


def test_rebuild_of_an_input_changed_later_is_refused() -> None:
    assert run_ranks(1, broken_later, False)[0] < FP64
    expect_refusal(1, broken_later, True, error="UnsupportedError", match=r"layer 1 cannot be under 'rebuild'")
