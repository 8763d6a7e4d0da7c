"""Findings from the survey's table: equal to discovery's, and not used for a model with other code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from ithaca.mesh import init_mesh
from ithaca.models.discover import findings as findings_module
from ithaca.models.discover.findings import Findings, surveyed
from ithaca.models.support import decoder_layers
from ithaca.planning.model.architectures import structures_of
from ithaca.planning.model.known_models import known_config
from ithaca.verify.small_models.features import build, small_model
from ithaca.verify.small_models.types import survey_config
from tests.ranks import run_ranks
from tools.survey.static import kinds
from tools.survey.structures import configs, find

# The text part of a model with several parts has its rows, and is no causal language model by itself.
STORED = [kind for kind in kinds() if structures_of(kind)]
QUICK = ("llama", "gemma2", "qwen3_moe", "granite")


def comparable(model: PreTrainedModel, found: Findings | None) -> Any:
    paths = {module: path for path, module in model.named_modules()}
    return found and replace(found, around=[(paths[stack], role) for stack, role in found.around])  # type: ignore[misc]


def differing(kind: str) -> tuple[int, list[str]]:
    """Return the number of a type's variants in the table, and the variants whose discovery differs."""
    mesh, known, wrong = init_mesh(sp=1, device="cpu"), 0, []
    for number, config in enumerate(configs(kind)):
        try:
            model = build(config)
        except ValueError:
            # A config class refuses a type without its window.
            continue
        found = surveyed(model, decoder_layers(model))
        known += found is not None
        if found is not None and comparable(model, found) != comparable(model, find(model, mesh)):
            wrong.append(f"{kind}, variant {number}")
    return known, wrong


@pytest.mark.parametrize("kind", [k if k in QUICK[:1] else pytest.param(k, marks=pytest.mark.slow) for k in STORED])
def test_table_of_every_variant_equals_discovery(kind: str) -> None:
    [(known, wrong)] = run_ranks(1, differing, kind)
    assert known > 0
    assert not wrong


def with_wrong_role(field: str, value: Any) -> tuple[int, list[str]]:
    table = structures_of("llama")
    layers = {key: [{**units[0], field: value}, *units[1:]] for key, units in table["layers"].items()}
    with patch.object(findings_module, "structures_of", lambda kind: {**table, "layers": layers}):
        return differing("llama")


@pytest.mark.slow
@pytest.mark.parametrize(("field", "value"), [("silent", False), ("names", ["mlp"]), ("end", None)])
def test_table_with_a_wrong_role_differs_from_discovery(field: str, value: Any) -> None:
    [(known, wrong)] = run_ranks(1, with_wrong_role, field, value)
    assert len(wrong) == known > 0


@pytest.mark.parametrize("kind", QUICK)
def test_surveyed_type_of_any_size_is_in_the_table(kind: str) -> None:
    model = build(survey_config(kind))
    assert surveyed(model, decoder_layers(model)) is not None


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "google/gemma-2-9b"]
)
def test_known_model_of_full_width_is_in_the_table(name: str) -> None:
    content = {"num_hidden_layers": 4, **(known_config(name) or {}), "layer_types": None}
    content = {key: value for key, value in content.items() if value is not None} | {"num_hidden_layers": 4}
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert surveyed(model, decoder_layers(model)) is not None


class OwnLayer(modeling_llama.LlamaDecoderLayer):
    pass


class OwnNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def layers_of(model: Any) -> Any:
    return model.model.layers


def mixing(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)).cumsum(1)


def exchanged_class(model: Any) -> None:
    layers_of(model)[1].__class__ = OwnLayer


def own_child(model: Any) -> None:
    layers_of(model)[1].input_layernorm = OwnNorm()


def child_of_another_type(model: Any) -> None:
    layers_of(model)[0].mlp = Qwen2MLP(model.config).to(model.dtype)


def own_forward(model: Any) -> None:
    mlp = layers_of(model)[0].mlp
    mlp.forward = MethodType(mixing, mlp)


def own_forward_of_the_model(model: Any) -> None:
    model.forward = MethodType(type(model).forward, model)


def hook(model: Any) -> None:
    layers_of(model)[1].mlp.register_forward_hook(lambda module, args, output: output * 2)


def dropout(model: Any) -> None:
    layers_of(model)[0].self_attn.attention_dropout = 0.1


def more_children(model: Any) -> None:
    layers_of(model)[0].adapter = nn.Linear(4, 4)


def shared_weight(model: Any) -> None:
    layers_of(model)[0].mlp.gate_proj.weight = layers_of(model)[0].mlp.up_proj.weight


def sequential_head(model: Any) -> None:
    model.lm_head = nn.Sequential(model.lm_head)


def checkpointing(model: Any) -> None:
    layers_of(model)[0].gradient_checkpointing = True


@pytest.mark.parametrize(
    "change",
    [
        exchanged_class, own_child, child_of_another_type, own_forward, own_forward_of_the_model, hook, dropout,
        more_children, shared_weight, sequential_head, checkpointing,
    ],
)  # fmt: skip
def test_changed_model_is_not_in_the_table(change: Callable[[Any], None]) -> None:
    model = small_model("llama")
    assert surveyed(model, decoder_layers(model)) is not None
    change(model)
    assert surveyed(model, decoder_layers(model)) is None


def wrapped(function: Any) -> Any:
    """Return a wrapper with the original's names, as functools.wraps makes one."""

    def instead(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    instead.__wrapped__, instead.__qualname__ = function, function.__qualname__  # type: ignore[attr-defined]
    instead.__module__ = function.__module__
    return instead


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (modeling_llama.LlamaMLP, "forward", mixing),
        (modeling_llama.LlamaMLP, "forward", wrapped(modeling_llama.LlamaMLP.forward)),
        (modeling_llama.LlamaMLP, "forward", Qwen2MLP.forward),
        (modeling_llama.LlamaRMSNorm, "forward", modeling_llama.LlamaMLP.forward),
        (modeling_llama, "apply_rotary_pos_emb", wrapped(modeling_llama.apply_rotary_pos_emb)),
        (modeling_llama, "rotate_half", lambda x: x),
        (nn.Linear, "forward", wrapped(nn.Linear.forward)),
    ],
)
def test_patched_library_is_not_in_the_table(owner: Any, name: str, instead: Any) -> None:
    model = small_model("llama")
    with patch.object(owner, name, instead):
        assert surveyed(model, decoder_layers(model)) is None
    assert surveyed(model, decoder_layers(model)) is not None
