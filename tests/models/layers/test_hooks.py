"""Hooks on modules of tiled, compiled or replayed layers: every hook runs, whenever it is registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.layers import install
from ithaca.models.layers.hooks import drop_hooks
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import LayerMode, MemoryPlan
from ithaca.training.watch.layer_boundaries import put_boundaries
from ithaca.verify.fp64 import promoted
from ithaca.verify.parity import compare, gradient_errors
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FAULT, FP64


def bend(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Return a non-linear function of each token alone, exact over ranks; a skipped output changes the gradients."""
    return output * (1 + output.square().mean(-1, keepdim=True))


def mix(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Return a function of all tokens together, which differs on a tile."""
    return output * (1 + output.square().mean())


def enter(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * (1 + args[0].square().mean()), *args[1:])


def weigh(_module: nn.Module, into: tuple[Tensor, ...], _out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (into[0] * 1.5,)


REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "bend": lambda module: module.register_forward_hook(bend),
    "mix": lambda module: module.register_forward_hook(mix),
    "enter": lambda module: module.register_forward_pre_hook(enter),
    "weigh": lambda module: module.register_full_backward_hook(weigh),
}


def error(
    kind: str, place: str, what: str, mode: LayerMode | None, before: bool, sp: int = 1, fuse: bool = False
) -> float:
    """Return the worst error of a model with one hook, registered before or after parallelize; mode None: memory="auto"."""
    model = small_model(kind, num_hidden_layers=3, output_router_logits=kind == "qwen3_moe")
    REGISTER[what](model.get_submodule(place))

    def prepare(own: Any, mesh: Any, **options: Any) -> Any:
        if before:
            return parallelize(own, mesh, **options)
        drop_hooks([own.get_submodule(place)])
        own = parallelize(own, mesh, **options)
        REGISTER[what](own.get_submodule(place))
        return own

    memory: Any = "auto" if mode is None else MemoryPlan((mode,) * 3, (False,) * 3, 4, 5)
    return compare(model, [[small_batch(2, 24)]], init_mesh(sp=sp), prepare=prepare, memory=memory, fuse=fuse).worst


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("what", ["mix", "enter", "weigh"])
def test_hook_on_head_is_exact(what: str, before: bool) -> None:
    assert run_ranks(1, error, "llama", "lm_head", what, "save", before)[0] < FP64


def _adapted_later() -> float:
    """Return the worst error with an adapter that is put on the head after parallelize."""
    mesh = init_mesh(sp=1)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    batch = small_batch(2, 24)
    plain, own = small_model("llama"), parallelize(small_model("llama"), mesh, weights="none")
    alone, adapted = (get_peft_model(model, config, autocast_adapter_dtype=False) for model in (plain, own))
    adapted.load_state_dict(alone.state_dict())
    with promoted():
        expected = reference(alone.get_base_model(), [[batch]])
        loss = causal_loss(adapted, batch, mesh)
        loss.backward()
    gradients = gradient_errors(adapted.get_base_model(), expected.gradients)
    assert any("lm_head" in name for name in gradients)
    return max(abs(float(loss.detach()) - expected.loss), *gradients.values())


def test_adapter_put_on_head_later_is_used() -> None:
    assert run_ranks(1, _adapted_later)[0] < FP64


NORM, MLP = "model.layers.1.post_attention_layernorm", "model.layers.1.mlp"


@pytest.mark.few(8)
@pytest.mark.parametrize("before", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("mode", [None, "save"])
@pytest.mark.parametrize("what", ["mix", "enter", "weigh"])
@pytest.mark.parametrize("place", [NORM, MLP, "model.layers.0.mlp.down_proj"])
def test_hook_inside_unit_is_exact(place: str, what: str, mode: LayerMode | None, before: bool) -> None:
    assert run_ranks(1, error, "llama", place, what, mode, before)[0] < FP64


@pytest.mark.parametrize("place", ["lm_head", NORM, MLP])
def test_hook_inside_unit_over_two_ranks_is_exact(place: str) -> None:
    assert max(run_ranks(2, error, "llama", place, "bend", "save", False, 2)) < FP64


@pytest.mark.parametrize("mode", ["keep", "save"])
def test_router_logits_beside_hook_are_exact(mode: LayerMode) -> None:
    assert run_ranks(1, error, "qwen3_moe", MLP, "mix", mode, False)[0] < FP64


@pytest.mark.slow
@pytest.mark.parametrize("place", ["model.layers.0.mlp", "model.layers.0.self_attn.q_norm"])
def test_compiled_code_holds_no_hook(place: str) -> None:
    """All layers share the compiled code, and one layer has a hook."""
    assert run_ranks(1, error, "qwen3", place, "bend", "save", True, 1, True, timeout=600)[0] < FP64


def _units_used(hook: bool) -> list[bool]:
    """Return for each child of a layer if its unit runs separately; transformers' recorders stay on the model."""
    model = small_model("qwen3_moe", output_router_logits=True, output_hidden_states=True)
    model(**small_batch(1, 8))
    parallelize(model, init_mesh(sp=1))
    layer: Any = model.get_submodule("model.layers.1")
    if hook:
        REGISTER["bend"](layer.mlp)
    return [
        child.forward.unit_forward.runs_separately
        for child in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp)
    ]


@pytest.mark.parametrize(("hook", "apart"), [(False, [False, False, False]), (True, [False, True, True])])
def test_units_with_hooks_run_separately(hook: bool, apart: list[bool]) -> None:
    assert run_ranks(1, _units_used, hook) == [apart]


def _another_forward() -> tuple[float, float]:
    """Return the loss of a model whose MLP gets another forward after parallelize, and the expected loss."""
    mesh, batch = init_mesh(sp=1), small_batch(1, 12)
    plain = small_model("llama")
    own = parallelize(small_model("llama"), mesh)
    for model in (plain, own):
        mlp: Any = model.get_submodule(MLP)
        mlp.forward = lambda x, forward=mlp.forward: forward(x) * x.square().mean()
    return float(causal_loss(own, batch, mesh).detach()), float(plain(**batch).loss.detach())


def test_forward_put_on_mlp_later_runs() -> None:
    [(got, expected)] = run_ranks(1, _another_forward)
    assert abs(got - expected) < FAULT


def _rebuilt(index: int, what: str) -> float:
    """Return the loss of a step over FSDP2 with rebuilt inputs and a hook on one layer."""
    mesh = init_mesh(sp=2)
    plan = MemoryPlan(("save", "rebuild", "save", "save"), (False,) * 4, 4, 5)
    model = parallelize(small_model("llama", num_hidden_layers=4), mesh, memory=plan)
    put_boundaries(model.model.layers, lambda _label: None)
    REGISTER[what](model.model.layers[index])
    loss = causal_loss(model, small_batch(1, 24), mesh)
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize(("index", "what"), [(0, "bend"), (1, "enter")])
def test_hook_before_rebuilt_input_is_refused(index: int, what: str) -> None:
    expect_refusal(2, _rebuilt, index, what, error="UnsupportedError", match="layer 0 or 1 has hooks")


def test_hook_elsewhere_beside_rebuilt_inputs_runs() -> None:
    assert run_ranks(2, _rebuilt, 3, "bend")


def _warnings(mode: LayerMode, place: str) -> list[str]:
    said: list[str] = []
    mesh = init_mesh(sp=1)
    model = small_model("llama")
    model.get_submodule(place).register_forward_hook(lambda *_: None)
    with patch.object(install.logger, "warning", lambda text, *given: said.append(text % given)):
        parallelize(model, mesh, memory=MemoryPlan((mode, mode), (False, False), 8, 8))
        for _ in range(2):
            causal_loss(model, small_batch(1, 12), mesh).backward()
    return said


def test_hook_in_replayed_layer_warns_once() -> None:
    [[said]] = run_ranks(1, _warnings, "save", "model.layers.1.self_attn.q_proj")
    assert said.startswith("self_attn.q_proj is in a layer that is run again in backward, and has a forward hook")
    assert run_ranks(1, _warnings, "keep", "model.layers.1.self_attn.q_proj") == [[]]
    # Around a layer, and outside of them, what is seen has its gradient.
    assert run_ranks(1, _warnings, "save", "model.layers.1") == run_ranks(1, _warnings, "save", "model.norm") == [[]]
