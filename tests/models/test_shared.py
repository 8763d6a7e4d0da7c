"""A module that is used twice is refused by name; weights that are used twice are exact where FSDP2 does not shard them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ithaca.handle import is_bound
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.verify.fp64 import compute_in_fp64, relative_error
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

PLANS = [
    None,
    MemoryPlan(("keep", "keep", "keep"), (False,) * 3, 8, 8),
    MemoryPlan(("save", "rebuild", "recompute"), (False,) * 3, 8, 8),
]


def one_layer(layers: Any) -> None:
    layers[2] = layers[0]


def one_mlp(layers: Any) -> None:
    layers[2].mlp = layers[0].mlp


def one_norm(layers: Any) -> None:
    layers[2].post_attention_layernorm = layers[1].post_attention_layernorm


def one_weight(layers: Any) -> None:
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight


def one_product(layers: Any) -> None:
    layers[2].self_attn.q_proj = layers[0].self_attn.q_proj


def of_the_rest(layers: Any, norm: nn.Module) -> None:
    layers[2].input_layernorm.weight = norm.weight


def llama(share: Any) -> Any:
    model: Any = small_model("llama", num_hidden_layers=3)
    if share is of_the_rest:
        share(model.model.layers, model.model.norm)
    else:
        share(model.model.layers)
    return model


def parallelized(share: Any, memory: Any) -> None:
    model = llama(share)
    try:
        parallelize(model, init_mesh(sp=1), memory=memory)
    finally:
        assert not is_bound(model)


@pytest.mark.parametrize(
    ("share", "match"),
    [
        (one_layer, r"layers 0 and 2 are one module: give each its own, by copy\.deepcopy"),
        (one_mlp, r"layers 0 and 2 share one mlp: give each its own, by copy\.deepcopy"),
        (one_norm, r"layers 1 and 2 share one post_attention_layernorm: give each its own"),
    ],
)
@pytest.mark.parametrize("memory", [pytest.param(None, marks=pytest.mark.slow), "auto"])
def test_module_used_twice_is_refused(share: Any, match: str, memory: Any) -> None:
    expect_refusal(1, parallelized, share, memory, error="UnsupportedError", match=match)


def gradients_of(share: Any, plan: MemoryPlan | None, sp: int) -> float:
    """The largest error of a gradient, taken as DDP would, by the mean over ranks."""
    mesh = init_mesh(sp=sp)
    plain, batch = llama(share), small_batch()
    with compute_in_fp64():
        wanted = reference(copy.deepcopy(plain), [[batch]]).gradients
        model = parallelize(plain, mesh, memory=plan, weights="none")
        causal_loss(model, batch, mesh).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for gradient in found.values():
        if sp > 1:
            torch.distributed.all_reduce(gradient)
    return max(relative_error(found[name] / sp, wanted[name]) for name in wanted)


@pytest.mark.parametrize("share", [one_weight, one_product, of_the_rest])
@pytest.mark.parametrize(
    "plan",
    [*(pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS[:2]), PLANS[2]],
    ids=["none", "keep", "mixed"],
)
def test_weights_used_twice_are_exact(share: Any, plan: MemoryPlan | None) -> None:
    assert run_ranks(1, gradients_of, share, plan, 1)[0] < FP64


@pytest.mark.parametrize("share", [one_weight, of_the_rest])
def test_weights_used_twice_over_ranks_with_callers_weights_are_exact(share: Any) -> None:
    assert max(run_ranks(2, gradients_of, share, PLANS[2], 2)) < FP64


def sharded(share: Any, weights: Any) -> None:
    parallelize(llama(share), init_mesh(sp=2), weights=weights)


@pytest.mark.parametrize("weights", ["shard", pytest.param("replicate", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("share", "names"),
    [
        (one_weight, r"model\.layers\.2\.mlp\.up_proj\.weight is model\.layers\.0\.mlp\.up_proj\.weight"),
        (one_product, r"model\.layers\.2\.self_attn\.q_proj\.weight is model\.layers\.0\.self_attn\.q_proj\.weight"),
        (of_the_rest, r"model\.norm\.weight is model\.layers\.2\.input_layernorm\.weight"),
    ],
)
def test_weights_shared_between_fsdp_groups_are_refused(share: Any, names: str, weights: str) -> None:
    match = names + r", and FSDP2 shards each layer by itself: give each its own, or wrap the model in DDP"
    expect_refusal(2, sharded, share, weights, error="UnsupportedError", match=match)
