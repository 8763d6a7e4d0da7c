"""Settings of layers with equal shapes.

Layers that differ in a dropout, an activation or an epsilon share neither findings nor compiled code; equal layers share
both. A setting that changes later is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.discover.roles import signature
from ithaca.models.layers import fuse
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.verify.fp64 import promoted
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import COMPILED, FP64

WHOLE = MemoryPlan(("save", "save"), (False, False), 64, 64)
KEPT = MemoryPlan(("keep", "keep"), (False, False), 64, 64)
TILED = MemoryPlan(("save", "recompute"), (False, False), 5, 7)
BATCH = small_batch(2, 16)
Change = Callable[[Any], None]


def gpt2() -> Any:
    return small_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def llama() -> Any:
    return small_model("llama", dtype=torch.float32)


def gradients(loss: Tensor, model: Any) -> dict[str, Tensor]:
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def farthest(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return max(float((got[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-3)) for n in wanted)


def dropout_in(index: int, plan: MemoryPlan) -> float:
    """Return the difference between a plan and no plan with a dropout in one layer's MLP, from equal random numbers."""
    mesh, found = init_mesh(sp=1), []
    for memory in (plan, None):
        model = gpt2()
        model.transformer.h[index].mlp.dropout.p = 0.3
        model = parallelize(model, mesh, memory=memory, weights="none")
        torch.manual_seed(7)
        found.append(gradients(causal_loss(model, BATCH, mesh), model))
    return farthest(*found)


@pytest.mark.parametrize("plan", [KEPT, WHOLE], ids=["keep", "save"])
@pytest.mark.parametrize("index", [0, 1])
def test_dropout_in_one_layer_is_found(index: int, plan: MemoryPlan) -> None:
    assert run_ranks(1, dropout_in, index, plan)[0] < FP64


def other_adapter() -> float:
    """Return the same difference with an adapter with dropout that is switched on after parallelize."""
    mesh, found = init_mesh(sp=1), []
    for memory in (WHOLE, None):
        torch.manual_seed(0)
        config = partial(LoraConfig, r=2, target_modules=["up_proj", "down_proj"], init_lora_weights=False)
        model: Any = get_peft_model(llama(), config(lora_dropout=0.0))
        model.add_adapter("other", config(lora_dropout=0.3))
        model = parallelize(model, mesh, memory=memory, weights="none")
        model.set_adapter("other")
        torch.manual_seed(7)
        found.append(gradients(causal_loss(model, BATCH, mesh), model))
    return farthest(*found)


def test_dropout_of_disabled_adapter_is_exact() -> None:
    assert run_ranks(1, other_adapter)[0] < COMPILED


def in_an_mlp(model: Any) -> None:
    model.transformer.h[1].mlp.dropout.p = 0.3


def of_embeddings(model: Any) -> None:
    model.transformer.drop.p = 0.3


def a_new_one(model: Any) -> None:
    mlp = model.transformer.h[1].mlp
    mlp.act = nn.Sequential(mlp.act, nn.Dropout(0.2))


def set_later(change: Change, plan: MemoryPlan) -> None:
    mesh = init_mesh(sp=1)
    model = parallelize(gpt2(), mesh, memory=plan)
    causal_loss(model, BATCH, mesh).backward()
    change(model)
    causal_loss(model, BATCH, mesh)


AGAIN = r"after parallelize: do so before it, or call ithaca\.unbind\(model\) and parallelize it again"


@pytest.mark.parametrize("plan", [KEPT, TILED], ids=["keep", "tiles"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (in_an_mlp, r"0\.3 was set at transformer\.h\.1\.mlp\.dropout"),
        (of_embeddings, r"0\.3 was set at transformer\.drop"),
        (a_new_one, r"0\.2 was set at transformer\.h\.1\.mlp\.act\.1"),
    ],
)
def test_dropout_set_later_is_refused(change: Change, what: str, plan: MemoryPlan) -> None:
    match = f"a dropout of {what} {AGAIN}"
    expect_refusal(1, set_later, change, plan, error="UnsupportedError", match=match)


def more_dropout() -> None:
    mesh = init_mesh(sp=1)
    model: Any = parallelize(small_model("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0), mesh, memory=TILED)
    for p in (0.2, 0.0):
        model.transformer.h[1].mlp.dropout.p = p
        causal_loss(model, BATCH, mesh).backward()


def test_dropout_known_from_start_changed_later_runs() -> None:
    run_ranks(1, more_dropout)


def epsilon(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.5


def activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def doubled(x: Tensor) -> Tensor:
    return 2 * x.sigmoid()


def function(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    del mlp.act_fn
    mlp.act_fn = doubled


def two_names(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight = mlp.up_proj.weight


def another_forward(model: Any) -> None:
    product = model.model.layers[1].mlp.up_proj
    product.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), product)


def compiled_error(before: Change, after: Change | None = None) -> float:
    mesh = init_mesh(sp=1)
    # Dynamo fixes a module's attributes in its graph whatever it is compiled with.
    real = torch.compile
    with patch.object(fuse.torch, "compile", lambda function: real(function, backend="eager")):
        plain, model = llama(), llama()
        before(plain)
        before(model)
        model = parallelize(model, mesh, memory=TILED, fuse=True, weights="none")
        if after is not None:
            after(model)
        wanted = gradients(plain(**BATCH).loss, plain)
        return farthest(gradients(causal_loss(model, BATCH, mesh), model), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("change", [activation, two_names, epsilon, function])
def test_compiled_code_of_different_layers_is_not_shared(change: Change) -> None:
    assert run_ranks(1, compiled_error, change)[0] < COMPILED


def nothing(model: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (epsilon, r"model\.layers\.1\.post_attention_layernorm\.variance_epsilon was changed from 1e-06 to 0\.5"),
        (another_forward, r"model\.layers\.1\.mlp\.up_proj was given a forward"),
    ],
)
def test_compiled_setting_changed_later_is_refused(change: Change, what: str) -> None:
    expect_refusal(1, compiled_error, nothing, change, error="UnsupportedError", match=f"{what} {AGAIN}")


def compiled_chains(change: Change) -> int:
    """Return the number of compiled functions in a model of two layers."""
    model = llama()
    change(model)
    with patch.object(fuse.torch, "compile", side_effect=lambda function: function) as compile_it:
        parallelize(model, init_mesh(sp=1), memory=TILED, fuse=True)
        return compile_it.call_count


@pytest.mark.parametrize(("change", "more"), [(nothing, 0), (epsilon, 3), (activation, 3)])
def test_compiled_code_of_equal_layers_is_shared(change: Change, more: int) -> None:
    """An MLP has three: the whole, the part before the last product, and that product's backward."""
    [same], [other] = run_ranks(1, compiled_chains, nothing), run_ranks(1, compiled_chains, change)
    assert other == same + more


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma", "gpt_neox", "qwen3_moe"])
def test_signature_of_equal_layers_is_equal(kind: str) -> None:
    """Activations that are partials or methods of their module, and layer indices, do not differ."""
    model: Any = small_model(kind)
    layers = getattr(model.base_model, "layers", None) or model.base_model.h
    assert signature(layers[0]) == signature(layers[1])


def shared_norm_weight(plan: MemoryPlan | None) -> float:
    """Return the error with one weight for the norms before and after an MLP, which are one unit."""
    mesh, found = init_mesh(sp=1), []
    for memory in (plan, None):
        model: Any = small_model("gemma2")
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.weight = layer.pre_feedforward_layernorm.weight
        with promoted():
            model = parallelize(model, mesh, memory=memory, weights="none")
            found.append(gradients(causal_loss(model, BATCH, mesh), model))
    return farthest(*found)


def test_weight_shared_by_two_children_has_one_gradient() -> None:
    assert run_ranks(1, shared_norm_weight, TILED)[0] < FP64
