"""Modules and weights replaced after parallelize.

A replaced module below a plan, or a whole weight among shards, is refused; elsewhere replacements are exact. Weights that are
frozen or unfrozen later are exact everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.binding import unbind
from ithaca.models.bound import binding_of, unsharded
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.verify.fp64 import promoted, relative_error
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

PLAN = MemoryPlan(("save", "rebuild"), (False, True), 8, 8)
Change = Callable[[Any], None]
AGAIN = r"after parallelize: do so before it, or call ithaca\.unbind\(model\) and parallelize it again"
SHARDED = r"was replaced after parallelize, which sharded the others: do so before it"


def llama() -> Any:
    return small_model("llama", num_hidden_layers=2)


def nothing(model: Any) -> None:
    pass


def new_mlp(model: Any) -> None:
    torch.manual_seed(7)
    model.model.layers[1].mlp = type(model.model.layers[1].mlp)(model.config).double()


def new_product(model: Any) -> None:
    torch.manual_seed(7)
    old = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = nn.Linear(old.in_features, old.out_features, bias=False, dtype=torch.float64)


def new_norm(model: Any) -> None:
    old = model.model.layers[0].post_attention_layernorm
    model.model.layers[0].post_attention_layernorm = nn.LayerNorm(len(old.weight), bias=False, dtype=torch.float64)


def new_layer(model: Any) -> None:
    torch.manual_seed(7)
    model.model.layers[1] = type(model.model.layers[1])(model.config, 1).double()


def one_layer_less(model: Any) -> None:
    del model.model.layers[1]


def new_head(model: Any) -> None:
    torch.manual_seed(7)
    old = model.lm_head
    model.lm_head = nn.Linear(old.in_features, old.out_features, bias=False, dtype=torch.float64)


def new_weight(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(torch.linspace(0.5, 1.5, model.config.hidden_size, dtype=torch.float64))


def more_words(model: Any) -> None:
    torch.manual_seed(7)
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)


def freeze(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)


def free(model: Any) -> None:
    model.requires_grad_(True)


def step(model: Any) -> Any:
    with promoted():
        loss = causal_loss(model, small_batch(), binding_of(model).mesh)
        loss.backward()
    return loss


def changed(change: Change, ran: bool, whole: bool) -> None:
    model = parallelize(llama(), init_mesh(sp=1), memory=PLAN)
    if ran:
        step(model)
    change(model)
    if whole:
        with unsharded(model):
            model(**small_batch())
    step(model)


@pytest.mark.parametrize("ran", [pytest.param(False, marks=pytest.mark.slow), True], ids=["at once", "after a step"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (new_mlp, r"model\.layers\.1\.mlp was put into the model"),
        (new_norm, r"model\.layers\.0\.post_attention_layernorm was put into the model"),
        (new_layer, r"model\.layers\.1 was put into the model"),
        (one_layer_less, r"modules were taken out of the model's layers"),
    ],
)
def test_replaced_module_below_plan_is_refused(change: Change, what: str, ran: bool) -> None:
    for whole in (False, True):
        match = f"{what} {AGAIN}"
        expect_refusal(1, changed, change, ran, whole, error="UnsupportedError", match=match)


def put_into_compiled() -> None:
    model = parallelize(llama(), init_mesh(sp=1), memory=PLAN, fuse=True)
    new_product(model)
    step(model)


@pytest.mark.slow
def test_replaced_module_inside_compiled_unit_is_refused() -> None:
    match = rf"model\.layers\.0\.mlp\.up_proj was put into the model {AGAIN}"
    expect_refusal(1, put_into_compiled, error="UnsupportedError", match=match)


def errors(before: Change, change: Change, plan: MemoryPlan | None, world: int = 1, *, again: bool = False) -> float:
    """Return the largest error of the loss or a gradient; the change is made after one step."""
    mesh = init_mesh(sp=world)
    plain, model = llama(), llama()
    for each in (before, change):
        each(plain)
    with promoted():
        wanted = reference(plain, [[small_batch()]])
    before(model)
    parallelize(model, mesh, memory=plan)
    step(model)
    model.zero_grad()
    change(model)
    if again:
        unbind(model)
        parallelize(model, mesh, memory=plan)
    loss = step(model)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    assert found.keys() == wanted.gradients.keys()
    off = [relative_error(found[name], gradient) for name, gradient in wanted.gradients.items()]
    return max(abs(float(loss.detach()) / wanted.loss - 1), *off)


@pytest.mark.parametrize("change", [new_mlp, new_product, new_norm])
def test_replaced_module_parallelized_again_is_exact(change: Change) -> None:
    assert run_ranks(1, errors, nothing, change, PLAN, again=True)[0] < FP64


@pytest.mark.parametrize(
    ("change", "plan"), [(new_mlp, None), (new_product, None), (new_norm, None), (new_product, PLAN)]
)
def test_replaced_module_unused_by_plan_is_exact(change: Change, plan: MemoryPlan | None) -> None:
    assert run_ranks(1, errors, nothing, change, plan)[0] < FP64


@pytest.mark.parametrize("change", [new_head, new_weight, more_words])
@pytest.mark.parametrize("plan", [pytest.param(None, marks=pytest.mark.slow), PLAN], ids=["no plan", "plan"])
def test_replaced_module_outside_layers_is_exact(change: Change, plan: MemoryPlan | None) -> None:
    assert run_ranks(1, errors, nothing, change, plan)[0] < FP64


@pytest.mark.parametrize(("before", "change"), [(freeze, free), (nothing, freeze)], ids=["freed", "frozen"])
@pytest.mark.parametrize("plan", [pytest.param(None, marks=pytest.mark.slow), PLAN], ids=["no plan", "plan"])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_freezing_weights_later_is_exact(before: Change, change: Change, plan: MemoryPlan | None, world: int) -> None:
    assert max(run_ranks(world, errors, before, change, plan, world)) < FP64


@pytest.mark.parametrize("plan", [pytest.param(None, marks=pytest.mark.slow), PLAN], ids=["no plan", "plan"])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (new_head, r"lm_head\.weight"),
        (new_weight, r"model\.norm\.weight"),
        (new_mlp, r"model\.layers\.1\.mlp\.gate_proj\.weight"),
        (new_layer, r"model\.layers\.1\.self_attn\.q_proj\.weight"),
    ],
)
def test_whole_weight_among_shards_is_refused(change: Change, name: str, plan: MemoryPlan | None) -> None:
    expect_refusal(2, errors, nothing, change, plan, 2, error="UnsupportedError", match=f"{name} {SHARDED}")


def gathered_ahead() -> float:
    model: Any = parallelize(llama(), init_mesh(sp=2), memory=PLAN)
    assert isinstance(model, FSDPModule)
    model.unshard()
    return float(step(model).detach())


def test_weights_gathered_by_unshard_are_accepted() -> None:
    plain = llama()
    with promoted():
        wanted = reference(plain, [[small_batch()]]).loss
    assert all(abs(loss / wanted - 1) < FP64 for loss in run_ranks(2, gathered_ahead))


def attention_put_in_later() -> None:
    model = parallelize(llama(), init_mesh(sp=2), memory=None, weights="none")
    model.model.layers[1].self_attn = type(model.model.layers[1].self_attn)(model.config, 1).double()
    step(model)


def test_attention_of_unbound_module_is_refused() -> None:
    match = r"LlamaAttention was put into the model after parallelize: put it in before"
    expect_refusal(2, attention_put_in_later, error="UnsupportedError", match=match)
