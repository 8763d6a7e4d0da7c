"""A unit's gradients without its output equal autograd's, and its last product runs once a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.discover.roles import UnitRole, find_units, layer_arguments
from ithaca.models.layers import fuse
from ithaca.models.layers.units import Fused, UnitBackward, UnitForward
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import run_ranks
from tests.tolerances import FP64

# Plain, with biases, without a gate, before a dropout that drops nothing; a norm after the MLP and a router's weights
# need its value.
ENDS = {
    "llama": "down_proj",
    "qwen3": "down_proj",
    "starcoder2": "c_proj",
    "nemotron": "down_proj",
    "phi3": "down_proj",
    "gpt_neox": "dense_4h_to_h",
    "gemma3_text": None,
    "olmo2": None,
    "qwen3_moe": None,
}


def first_layer(model: Any) -> tuple[nn.Module, UnitRole]:
    """Return the first layer and the role of its MLP unit."""
    layers = list(model.base_model.layers)
    args, kwargs = layer_arguments(model, layers)[0]
    [unit] = [role for role in find_units(layers[0], args, kwargs) if role.wide]
    return layers[0], unit


@pytest.mark.parametrize(("kind", "end"), ENDS.items())
def test_find_units_end_is_output_module(kind: str, end: str | None) -> None:
    assert first_layer(small_model(kind))[1].end == end


def with_adapters(model: Any) -> Any:
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config).base_model.model


def frozen_but(name: str) -> Callable[[Any], Any]:
    def freeze(model: Any) -> Any:
        for own, p in model.named_parameters():
            p.requires_grad_(name in own)
        return model

    return freeze


TRAINED: dict[str, Callable[[Any], Any]] = {
    "all": lambda model: model,
    "adapters": with_adapters,
    "last": frozen_but("down_proj"),
    "first": frozen_but("up_proj"),
    "none": frozen_but("nothing"),
}


@pytest.mark.few(25)
@pytest.mark.parametrize("kind", ["llama", "phi3", "olmo"])  # A dropout after it, a norm without weights before it.
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("inward", [True, False])
@pytest.mark.parametrize("trained", TRAINED)
def test_unit_backward_without_output_equals_autograd(
    kind: str, trained: str, inward: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse.torch, "compile", lambda function: function)
    torch.manual_seed(0)
    model = TRAINED[trained](small_model(kind, dtype=torch.float64))
    layer, role = first_layer(model)
    children = role.children(layer)
    fused = Fused.of(layer, role)
    own, split = UnitForward(children, [child.forward for child in children], None, 0, fused), fused.split
    assert split is not None
    x_BtC, dout_BtC = torch.randn(2, rows, 5, model.config.hidden_size, dtype=torch.float64)
    x_BtC.requires_grad_(inward)
    wanted = [p for child in children for p in child.parameters() if p.requires_grad]
    expected = plain_gradients(children, x_BtC, dout_BtC, [x for x in (x_BtC, *wanted) if x.requires_grad])
    with torch.no_grad():
        got = UnitBackward(role.until_main(layer), split, own)(x_BtC, dout_BtC)
    torch.testing.assert_close(got, expected, atol=FP64, rtol=FP64)


def plain_gradients(
    children: list[nn.Module], x_BtC: Tensor, dout_BtC: Tensor, inputs: list[Tensor]
) -> list[Tensor | None]:
    if not inputs:
        return []
    given = x_BtC
    for child in children:
        given = child(given)
    return list(torch.autograd.grad(given, inputs, dout_BtC))


def products(mode: str) -> int:
    """Return the number of products with the MLP's last matrix in a compiled step, per layer."""
    mesh = init_mesh(sp=1)
    model = small_model("llama", dtype=torch.float32)
    wide, hidden = model.config.intermediate_size, model.config.hidden_size
    layers = model.config.num_hidden_layers
    plan = MemoryPlan((mode,) * layers, (False,) * layers, 24, 24)  # type: ignore[arg-type]
    model = parallelize(model, mesh, memory=plan, fuse=True, weights="none")
    batch = small_batch(1, 24)
    causal_loss(model, batch, mesh).backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        causal_loss(model, batch, mesh).backward()
    shapes = [event.input_shapes[:2] for event in seen.events() if event.name == "aten::mm"]
    return shapes.count([[24, wide], [wide, hidden]]) // layers


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", "save"])
def test_replayed_layer_multiplies_last_product_once(mode: str) -> None:
    """One in forward and two in backward (gate and up have the same shapes); a replay adds none."""
    assert run_ranks(1, products, mode, timeout=600) == [3]
