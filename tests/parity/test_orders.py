"""Passes and backwards in any order: two passes before a backward, evaluations between, another plan for each pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.mesh import Mesh, init_mesh
from ithaca.models.binding_state import binding_of, unsharded
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.verify.fp64 import compute_in_fp64, relative_error
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import small_batch, small_model
from tests.pairs import cover
from tests.ranks import run_ranks
from tests.tolerances import FP64

SHORT, LONG = small_batch(), small_batch(length=40, seed=5)
PLANS = {
    "keep": MemoryPlan(("keep", "keep"), (False, False), 8, 8),
    "keep, one tile": MemoryPlan(("keep", "keep"), (False, False), 64, 64),
    "save": MemoryPlan(("save", "save"), (False, False), 8, 8),
    "save, groups": MemoryPlan(("save", "save"), (True, False), 16, 16, head_groups=2),
    "rebuild": MemoryPlan(("save", "rebuild"), (False, True), 8, 4),
    "recompute, groups": MemoryPlan(("recompute", "save"), (True, True), 8, 8, head_groups=4),
}
Lossy = Callable[[dict[str, Tensor]], Tensor]


def llama() -> Any:
    return small_model("llama", num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)


def added(loss: Lossy, model: Any) -> None:
    (loss(SHORT) + loss(LONG)).backward()


def crossed(loss: Lossy, model: Any) -> None:
    first, second = loss(SHORT), loss(LONG)
    first.backward()
    second.backward()


def stacked(loss: Lossy, model: Any) -> None:
    first, second = loss(SHORT), loss(LONG)
    second.backward()
    first.backward()


def looked_between(loss: Lossy, model: Any) -> None:
    first = loss(SHORT)
    model.eval()
    with torch.no_grad():
        loss(LONG)
        with unsharded(model):
            model(input_ids=LONG["input_ids"])
    model.train()
    first.backward()
    loss(LONG).backward()


def dropped(loss: Lossy, model: Any) -> None:
    loss(LONG)
    crossed(loss, model)


def _gradients(model: Any) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def _worst(sp: int, plan: str, run: Callable[[Any, Mesh, int], None]) -> float:
    mesh, plain, model = init_mesh(sp=sp), llama(), llama()
    parallelize(model, mesh, memory=PLANS[plan])
    with compute_in_fp64():
        wanted = reference(plain, [[SHORT, LONG]]).gradients
        run(model, mesh, count_tokens([SHORT, LONG], mesh))
    found = _gradients(model)
    return max(relative_error(found[name], gradient) for name, gradient in wanted.items())


def in_order(sp: int, plan: str, order: Callable[[Lossy, Any], None]) -> float:
    return _worst(sp, plan, lambda model, mesh, n: order(lambda batch: causal_loss(model, batch, mesh, count=n), model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "plan", "sp"), cover([added, crossed, stacked, looked_between, dropped], list(PLANS), [1, 2])
)
def test_passes_any_order_equals_one_process(order: Any, plan: str, sp: int) -> None:
    assert max(run_ranks(sp, in_order, sp, plan, order)) < FP64


def replanned(sp: int, first: str, second: str) -> float:
    """As for lengths that differ, each of which has a plan of its own."""

    def run(model: Any, mesh: Mesh, n: int) -> None:
        one = causal_loss(model, SHORT, mesh, count=n)
        memory: Any = binding_of(model).memory
        memory.apply(PLANS[second])
        two = causal_loss(model, LONG, mesh, count=n)
        (one + two).backward()

    return _worst(sp, first, run)


QUICK = [("save, groups", "keep"), ("save", "save, groups"), ("rebuild", "recompute, groups")]


@pytest.mark.parametrize(
    ("first", "second", "sp"),
    [
        *((*pair, 2) for pair in QUICK),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in cover(list(PLANS), list(PLANS), [1, 2], allowed=lambda first, second, _: first != second)
            if case[:2] not in QUICK
        ),
    ],
)
def test_pass_planned_again_goes_back_under_its_own_plan(first: str, second: str, sp: int) -> None:
    assert max(run_ranks(sp, replanned, sp, first, second)) < FP64
