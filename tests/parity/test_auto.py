"""Plans that are chosen when the first batch is there, in whole or but for what was decided by hand: the same gradients."""

from __future__ import annotations

from typing import Any

from torch import nn

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.planner.memory_planner import planner_of
from ithaca.parallelize import parallelize
from ithaca.verify.parity import compare
from ithaca.verify.small_models.features import small_batch, small_model
from tests.batches import micro_batches
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

LAYERS = 4


def _auto(budget: int | str | None, memory: Any = "auto") -> tuple[float, str]:
    """Under a budget in bytes: the error, and the modes that were chosen."""
    mesh = init_mesh(sp=2)
    model = small_model("llama", num_hidden_layers=LAYERS)
    chosen = []
    batches = micro_batches(1, 1, ["plain", "packed", "learned_at_the_end"])

    def prepare(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
        parallel = parallelize(model, mesh, **options)
        chosen.append(parallel)
        return parallel

    result = compare(model, batches, mesh, prepare=prepare, memory=memory, memory_budget=budget)
    modes = [layer.__dict__["forward"].mode for layer in chosen[0].model.layers]
    return result.worst, ",".join(sorted(set(modes)))


def test_auto_free_memory_keeps_everything() -> None:
    for error, modes in run_ranks(2, _auto, None):
        assert error < FP64
        assert modes == "keep"


def test_auto_tight_memory_recomputes() -> None:
    for budget in (1_140_000, "1.14MB"):
        for error, modes in run_ranks(2, _auto, budget):
            assert error < FP64
            assert modes == "recompute,save"


def test_auto_settings_by_hand_stay_and_the_rest_is_chosen() -> None:
    each = ["save", "keep", "recompute", "save"]
    for memory, expected in (({"layers": "save", "mlp_tile": 3}, "save"), ({"layers": each}, "keep,recompute,save")):
        for error, modes in run_ranks(2, _auto, None, memory):
            assert error < FP64
            assert modes == expected
    # Under a budget that some layers must recompute for, all of them do or none does where that is decided.
    for error, modes in run_ranks(2, _auto, 1_140_000, {"layers": "recompute", "loss_tile": 4}):
        assert error < FP64
        assert modes == "recompute"
    match = r"any one of these fits: memory='auto'"
    expect_refusal(2, _auto, 1_140_000, {"layers": "keep"}, error="MemoryPlanError", match=match)


def _decided() -> list[Any]:
    mesh = init_mesh(sp=1)
    model = parallelize(small_model("llama"), mesh, memory={"mlp_tile": 5, "loss_tile": 3, "head_groups": 2})
    causal_loss(model, small_batch(1, 12), mesh).backward()
    chosen: Any = planner_of(model)
    return [chosen.plan.mlp_tile, chosen.plan.loss_tile, chosen.plan.head_groups, chosen.plan.layers]


def test_auto_tiles_by_hand_are_used() -> None:
    assert run_ranks(1, _decided) == [[5, 3, 2, ("keep",) * 2]]


def test_auto_budget_too_small_names_what_fits() -> None:
    expect_refusal(2, _auto, 100_000, error="MemoryPlanError", match=r"largest term is .*")
