"""Changes that a user can make between building a model and `parallelize`: the table knows no changed model otherwise than
discovery does. Each change is either a miss, or a hit with findings equal to those of a run."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import (
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.integrations import moe
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from ithaca.mesh import init_mesh
from ithaca.models.discover.findings import surveyed
from ithaca.models.support import decoder_layers
from ithaca.verify.small_models.features import build
from ithaca.verify.small_models.types import survey_config
from tests.models.discover.test_structure import comparable
from tests.ranks import run_ranks
from tools.survey.structures import find

Change = Callable[[Any], Any]


def layer_of(model: Any, index: int = 0) -> Any:
    return decoder_layers(model)[index]


def mixing_act(x: Tensor) -> Tensor:
    return F.sigmoid(x).cumsum(1)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return mixing_act(x)


class MixingNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).cumsum(1)


# Changes of the model alone.


def residual_multiplier(model: Any) -> None:
    layer_of(model).residual_multiplier = 1.0
    layer_of(model, 1).residual_multiplier = -2.5


def residual_tensor(model: Any) -> None:
    layer_of(model).residual_multiplier = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))


def logits_scaling(model: Any) -> None:
    model.config.logits_scaling = 7.0


def no_softcap(model: Any) -> None:
    model.config.final_logit_softcapping = None


def parallel_residual(model: Any) -> None:
    layer_of(model).use_parallel_residual = not layer_of(model).use_parallel_residual


def own_activation(model: Any) -> None:
    layer_of(model).mlp.act_fn = Mixing()


def activation_of_torch_that_mixes(model: Any) -> None:
    layer_of(model).mlp.act_fn = nn.Softmax(dim=1)


def activation_function(model: Any) -> None:
    del layer_of(model).mlp.act_fn
    layer_of(model).mlp.act_fn = mixing_act


def activation_beside_the_module(model: Any) -> None:
    layer_of(model).mlp.__dict__["act_fn"] = mixing_act


def hidden_act(model: Any) -> None:
    model.config.hidden_act = "gelu"


def dropout_in_config(model: Any) -> None:
    model.config.attention_dropout = model.config.hidden_dropout = 0.3


def dropout_module(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2


def evaluation(model: Any) -> None:
    model.eval()


def half_in_training(model: Any) -> None:
    layer_of(model).eval()


def layer_types(model: Any) -> None:
    model.config.layer_types = list(reversed(model.config.layer_types))


def layer_type(model: Any) -> None:
    layer_of(model).attention_type = "full_attention"
    layer_of(model).self_attn.is_sliding = False


def buffer_on_a_layer(model: Any) -> None:
    layer_of(model).register_buffer("scale", torch.ones(3))


def buffer_in_place_of_a_weight(model: Any) -> None:
    norm = layer_of(model).input_layernorm
    weight = norm.weight.detach()
    del norm.weight
    norm.register_buffer("weight", weight[None])


def spectral_norm(model: Any) -> None:
    parametrizations.spectral_norm(layer_of(model).mlp.down_proj)


def old_spectral_norm(model: Any) -> None:
    torch.nn.utils.spectral_norm(layer_of(model).mlp.down_proj)


def weight_norm(model: Any) -> None:
    parametrizations.weight_norm(layer_of(model).mlp.down_proj)


def own_parametrization(model: Any) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh()

    parametrize.register_parametrization(layer_of(model).mlp.down_proj, "weight", Symmetric())


def pruned(model: Any) -> None:
    prune.random_unstructured(layer_of(model).mlp.down_proj, "weight", 0.5)


def subclass(model: Any) -> None:
    layer_of(model).post_attention_layernorm.__class__ = MixingNorm


def forged_subclass(model: Any) -> None:
    kind = type("Linear", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x).cumsum(1)})
    kind.__module__ = "torch.nn.modules.linear"
    layer_of(model).mlp.down_proj.__class__ = kind


def one_norm_at_two_places(model: Any) -> None:
    layer_of(model).post_attention_layernorm = layer_of(model).input_layernorm


def one_mlp_in_two_layers(model: Any) -> None:
    layer_of(model, 1).mlp = layer_of(model, 0).mlp


def one_layer_twice(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def swapped_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList(reversed(model.model.layers))


def sequential_mlp(model: Any) -> None:
    mlp = layer_of(model).mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.SiLU())


def layer_norm_over_tokens(model: Any) -> None:
    layer_of(model).input_layernorm = nn.LayerNorm((4, 32), elementwise_affine=False)


def unfold_of_tokens(model: Any) -> None:
    layer_of(model).mlp.act_fn = nn.GLU(dim=-2)


def instance_helper(model: Any) -> None:
    attention = layer_of(model).self_attn
    attention.forward = partial(type(attention).forward, attention)


def instance_call(model: Any) -> None:
    layer_of(model).mlp.__dict__["_call_impl"] = lambda x: mixing_act(x)


def compiled_layer(model: Any) -> None:
    layer_of(model).compile(backend="eager")


def pre_hook(model: Any) -> None:
    layer_of(model).mlp.register_forward_pre_hook(lambda module, args: (mixing_act(args[0]),))


def hook_on_the_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 3)


def hook_on_the_model(model: Any) -> None:
    model.model.register_forward_hook(lambda module, args, output: output)


def head_of_a_method(model: Any) -> None:
    model.get_output_embeddings = lambda: None


def other_inner_model(model: Any) -> None:
    model.base_model_prefix = "elsewhere"


def checkpointing_of_transformers(model: Any) -> None:
    model.gradient_checkpointing_enable()


def attention_implementation(model: Any) -> None:
    model.set_attn_implementation("sdpa")


def loss_function(model: Any) -> None:
    model.loss_function = lambda *args, **kwargs: torch.zeros(())


def frozen(model: Any) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def half_precision(model: Any) -> None:
    model.bfloat16()


def tied_by_hand(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def head_with_a_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.ones(model.config.vocab_size, dtype=torch.float64))


def config_of_ones_own(model: Any) -> None:
    class Own(type(model.config)):  # type: ignore[misc]
        residual_multiplier = 3.0

    model.config.__class__ = Own


def other_config_of_a_layer(model: Any) -> None:
    config = copy.deepcopy(model.config)
    config.attention_dropout = 0.5
    layer_of(model).mlp.config = config


def int8_weights(model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model.float()
    quantize_(layer_of(model).mlp, Int8WeightOnlyConfig())


def quantized_linear(model: Any) -> None:
    mlp = layer_of(model).mlp
    linear = torch.ao.nn.qat.Linear(  # type: ignore[attr-defined]
        32, 48, qconfig=torch.ao.quantization.get_default_qat_qconfig()
    )
    mlp.gate_proj = linear.double()


def routed_experts_jitter(model: Any) -> None:
    layer_of(model).mlp.jitter_noise = 0.1


def normalized_routes(model: Any) -> None:
    layer_of(model).mlp.gate.norm_topk_prob = False


ON_THE_MODEL: list[tuple[str, Change]] = [
    ("granite", residual_multiplier),
    ("granite", residual_tensor),
    ("granite", logits_scaling),
    ("gemma2", no_softcap),
    ("gpt_neox", parallel_residual),
    ("gpt_neox", dropout_module),
    ("gpt_neox", dropout_in_config),
    ("gemma2", layer_types),
    ("gemma2", layer_type),
    ("gemma2", swapped_layers),
    ("mixtral", routed_experts_jitter),
    ("qwen3_moe", normalized_routes),
    *(
        ("llama", change)
        for change in (
            own_activation, activation_of_torch_that_mixes, activation_function, activation_beside_the_module, hidden_act,
            dropout_in_config, evaluation, half_in_training, buffer_on_a_layer, buffer_in_place_of_a_weight, spectral_norm,
            old_spectral_norm, weight_norm, own_parametrization, pruned, subclass, forged_subclass, one_norm_at_two_places,
            one_mlp_in_two_layers, one_layer_twice, fewer_layers, sequential_mlp, layer_norm_over_tokens, unfold_of_tokens,
            instance_helper, instance_call, compiled_layer, pre_hook, hook_on_the_head, hook_on_the_model, head_of_a_method,
            other_inner_model, checkpointing_of_transformers, attention_implementation, loss_function, frozen,
            half_precision, tied_by_hand, head_with_a_bias, config_of_ones_own, other_config_of_a_layer, int8_weights,
            quantized_linear,
        )
    ),
]  # fmt: skip


# Changes of classes and modules, taken back after the test.


def other_function(name: str, instead: Any) -> Any:
    return patch.object(modeling_llama, name, instead)


def rotary_of_ones_own(q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
    return q, k


@wraps(modeling_llama.LlamaMLP.forward)
def wrapped_forward(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(mixing_act(self.gate_proj(x)) * self.up_proj(x))


def unwrapped_forward(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(mixing_act(self.gate_proj(x)) * self.up_proj(x))


def closed_over(function: Callable[..., Any]) -> Any:
    # A function of torch's own file, around any other, and without a trace of it in `__wrapped__`.
    given = torch.no_grad()(function)
    del given.__wrapped__
    return given


class OwnRouting(torch.autograd.Function):
    pass


MLP, NORM, LAYER = modeling_llama.LlamaMLP, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaDecoderLayer
IN_THE_CODE: list[tuple[str, str, Callable[[], Any]]] = [
    ("forward of a class", "llama", lambda: patch.object(MLP, "forward", unwrapped_forward)),
    ("forward with the names of the old one", "llama", lambda: patch.object(MLP, "forward", wrapped_forward)),
    ("compiled forward", "llama", lambda: patch.object(MLP, "forward", torch.compile(MLP.forward, backend="eager"))),
    ("forward in no_grad", "llama", lambda: patch.object(MLP, "forward", torch.no_grad()(MLP.forward))),
    ("forward in autocast", "llama", lambda: patch.object(MLP, "forward", torch.autocast("cpu")(MLP.forward))),
    ("forward in a closure", "llama", lambda: patch.object(MLP, "forward", closed_over(unwrapped_forward))),
    ("forward of a sibling", "llama", lambda: patch.object(NORM, "forward", lambda self, x: x)),
    ("call of a class", "llama", lambda: patch.object(MLP, "__call__", unwrapped_forward, create=True)),
    ("getattr of modules", "llama", lambda: patch.object(nn.Module, "__getattr__", lambda self, name: None)),
    ("forward of Linear", "llama", lambda: patch.object(nn.Linear, "forward", lambda self, x: x)),
    ("call of modules", "llama", lambda: patch.object(nn.Module, "__call__", lambda self, *a, **k: None)),
    ("flag of a class", "llama", lambda: patch.object(LAYER, "gradient_checkpointing", True)),
    ("cached forward", "llama", lambda: patch.object(MLP, "extra", property(unwrapped_forward), create=True)),
    ("descriptor", "llama", lambda: patch.object(MLP, "forward", types.MethodType(unwrapped_forward, None.__class__))),
    ("function of the file", "llama", lambda: other_function("apply_rotary_pos_emb", rotary_of_ones_own)),
    ("partial in the file", "llama", lambda: other_function("apply_rotary_pos_emb", partial(rotary_of_ones_own))),
    ("sibling in the file", "llama", lambda: other_function("apply_rotary_pos_emb", modeling_llama.rotate_half)),
    ("mask function", "llama", lambda: other_function("create_causal_mask", lambda *a, **k: None)),
    ("class of the file", "llama", lambda: other_function("LlamaMLP", MixingNorm)),
    ("namespace for torch", "llama", lambda: other_function("torch", types.SimpleNamespace(**vars(torch)))),
    ("module for nn", "llama", lambda: other_function("nn", types.ModuleType("torch.nn"))),
    ("F.silu", "llama", lambda: patch.object(F, "silu", lambda x, inplace=False: mixing_act(x))),
    ("F.silu of torch", "llama", lambda: patch.object(F, "silu", F.softmax)),
    ("F.linear", "llama", lambda: patch.object(F, "linear", lambda x, w, b=None: x @ w.T)),
    ("experts", "mixtral", lambda: patch.dict(moe.ALL_EXPERTS_FUNCTIONS._local_mapping, {"grouped_mm": mixing_act})),
    ("softmax of the router", "mixtral", lambda: patch.object(F, "softmax", lambda x, *a, **k: x.cumsum(0))),
    ("F of the file", "mixtral", lambda: patch.object(modeling_mixtral, "F", types.SimpleNamespace(**vars(F)))),
]


def changed_model(kind: str, change: Change) -> Any:
    model = build(survey_config(kind))
    assert surveyed(model, decoder_layers(model)) is not None
    return change(model) or model


def missed_or_equal(kind: str, change: Change) -> bool:
    """Return True if the changed model is a miss; a hit has to be equal to discovery."""
    model = changed_model(kind, change)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = surveyed(base, decoder_layers(base))
    if found is not None:
        assert comparable(base, found) == comparable(base, find(base, init_mesh(sp=1, device="cpu")))
    return found is None


EQUAL = {
    logits_scaling, no_softcap, hidden_act, evaluation, half_in_training, layer_types, fewer_layers, swapped_layers,
    attention_implementation, normalized_routes, frozen, half_precision, tied_by_hand, loss_function, residual_multiplier,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "change"), ON_THE_MODEL, ids=lambda x: getattr(x, "__name__", x))
def test_changed_model_is_a_miss_or_has_equal_findings(kind: str, change: Change) -> None:
    [missed] = run_ranks(1, missed_or_equal, kind, change)
    assert missed or change in EQUAL


ADAPTERS: dict[str, Any] = {
    "lora": LoraConfig(target_modules=["gate_proj"], task_type="CAUSAL_LM"),
    "lora with dropout": LoraConfig(target_modules=["down_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"),
    "dora": LoraConfig(target_modules=["down_proj"], use_dora=True, task_type="CAUSAL_LM"),
    "lora of attention": LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "lora of the head": LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"),
    "saved norms": LoraConfig(target_modules=["q_proj"], modules_to_save=["input_layernorm"], task_type="CAUSAL_LM"),
    "ia3": IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "norms": LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"),
    "prompt": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "prefix": PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}
OUTSIDE_THE_MODEL = ("prompt", "prefix")


def with_adapter(name: str) -> bool:
    return missed_or_equal("llama", lambda model: get_peft_model(model, ADAPTERS[name]))


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapted_model_is_a_miss_or_has_equal_findings(name: str) -> None:
    [missed] = run_ranks(1, with_adapter, name)
    assert missed == (name not in OUTSIDE_THE_MODEL)


@pytest.mark.parametrize(("name", "kind", "change"), IN_THE_CODE, ids=lambda x: x if isinstance(x, str) else "")
def test_changed_code_is_a_miss(name: str, kind: str, change: Callable[[], Any]) -> None:
    model: Any = build(survey_config(kind))
    if name == "experts":
        model.float().config._experts_implementation = "grouped_mm"
    layers = decoder_layers(model)
    assert surveyed(model, layers) is not None
    with change():
        assert surveyed(model, layers) is None
    assert surveyed(model, layers) is not None


def test_hook_on_every_module_is_a_miss() -> None:
    model = build(survey_config("llama"))
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert surveyed(model, decoder_layers(model)) is None
    finally:
        handle.remove()
