"""Parameter counts against transformers' own modules, and against published totals."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ithaca.errors import UnsupportedError
from ithaca.planning.model.architectures import architectures, facts_of
from ithaca.planning.model.config_names import cautions_of, common_config
from ithaca.planning.model.known_models import known_config, known_names
from ithaca.planning.model.model_sizes import ModelSizes
from tests.planning.models import B1, B8, LLAMA_8B

COUNTED = {kind for kind in architectures()["architectures"] if facts_of(kind).counted}
WITH_DEFAULTS = sorted(kind for kind in architectures()["architectures"] if facts_of(kind).defaults)
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {"head_dim": 4}),
    ("qwen3", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("phi3", {"head_dim": 4}),
    ("olmo2", {"head_dim": 4}),
    ("starcoder2", {"head_dim": 4}),
    ("mixtral", EXPERTS),
    ("qwen2_moe", {**EXPERTS, "head_dim": 4, "shared_expert_intermediate_size": 24, "num_experts": 4}),
    ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("gpt_oss", EXPERTS),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 12, "first_k_dense_replace": 1, "n_shared_experts": 2}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 1}),
]


@pytest.mark.parametrize(("kind", "more"), CASES, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(CASES)])
def test_model_sizes_every_layout_equals_modules(kind: str, more: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind, **{**SMALL, **more})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = ModelSizes.from_config(config.to_dict())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert [layer.parameters for layer in sizes.layers] == layers
    assert sizes.total == sum(p.numel() for p in model.parameters())
    assert sizes.heads == 8


def default_of(kind: str) -> Any:
    """transformers' own config of a family, with eight layers."""
    config = AutoConfig.for_model(kind)
    text = config.get_text_config()
    for name in ("num_hidden_layers", "n_layer"):
        if hasattr(text, name):
            setattr(text, name, 8)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(text, name, None), list):
            setattr(text, name, getattr(text, name)[:8])
    return config


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(COUNTED))
def test_model_sizes_counted_type_equals_modules(kind: str) -> None:
    """Counts are exact to a percent: small biases and norms are left out."""
    config = default_of(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = ModelSizes.from_config(json.loads(json.dumps(config.to_dict(), default=str))).total
    assert counted == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)
    assert "sizes" not in cautions_of(config.to_dict())


def test_facts_uncounted_type_is_marked() -> None:
    assert "'jetmoe' are counted as Llama's" in cautions_of({**LLAMA_8B, "model_type": "jetmoe"})["sizes"]
    assert not {str(config.get("model_type")) for config in map(known_config, known_names())} - COUNTED


SLIDING = [
    "afmoe",
    "cohere2",
    "cwm",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "granite_swa",
    "olmo3",
    "vaultgemma",
]


@pytest.mark.parametrize("kind", SLIDING)
def test_windows_without_layer_types_equal_transformers(kind: str) -> None:
    """Old config files have no layer_types."""
    config = default_of(kind)
    old = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    windows = [layer.window for layer in ModelSizes.from_config(old).layers]
    assert windows == [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe", "smollm3"])
def test_windows_of_old_config_follow_facts(kind: str) -> None:
    old = {**AutoConfig.for_model(kind, num_hidden_layers=32).to_dict(), "sliding_window": 4096}
    for key in ("layer_types", "use_sliding_window"):
        old.pop(key, None)
    assert {layer.window for layer in ModelSizes.from_config(old).layers} == {None}
    if kind in ("qwen2", "qwen3"):
        told = ModelSizes.from_config({**old, "use_sliding_window": True, "max_window_layers": 28})
        assert [layer.window for layer in told.layers] == [None] * 28 + [4096] * 4


GPT_2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 4, "n_head": 8, "n_positions": 128}


@pytest.mark.parametrize(
    ("kind", "more"),
    [("gpt2", {}), ("gpt2", {"n_inner": 48}), ("gpt_bigcode", {}), ("gpt_bigcode", {"multi_query": False})],
)
def test_model_sizes_other_key_names_equal_modules(kind: str, more: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind, **GPT_2, **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # As it lies on the hub: null where the width is the usual one.
    sizes = ModelSizes.from_config({"model_type": kind, "n_inner": None, **GPT_2, **config.to_diff_dict()})
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.transformer.h]
    assert [layer.parameters for layer in sizes.layers] == layers
    assert sizes.total == sum(p.numel() for p in model.parameters())
    assert (sizes.heads, sizes.tied, sizes.layers[0].gated) == (8, True, False)


PUBLISHED: list[tuple[dict[str, Any], int]] = [
    (LLAMA_8B, 8_030_261_248),
    (
        {**LLAMA_8B, "model_type": "mistral", "vocab_size": 32000},
        7_241_732_096,
    ),
    (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        30_532_122_624,
    ),
    (
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 9216,
            "vocab_size": 256000,
        },
        2_614_341_888,
    ),
    (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "experts_per_token": 4,
            "vocab_size": 201088,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        20_914_757_184,
    ),
]


@pytest.mark.parametrize(("config", "total"), PUBLISHED, ids=[str(config["model_type"]) for config, _ in PUBLISHED])
def test_model_sizes_total_equals_published(config: dict[str, Any], total: int) -> None:
    assert ModelSizes.from_config(config).total == total


def test_layer_sizes_experts_count_active_parameters() -> None:
    sizes = ModelSizes.from_config(PUBLISHED[2][0])
    layer = sizes.layers[0]
    assert (layer.experts, layer.experts_per_token, layer.width) == (128, 8, 8 * 768)
    active = sizes.total - sum(layer.mlp - layer.active for layer in sizes.layers)
    assert active == pytest.approx(3.35e9, rel=0.01)


def test_model_sizes_tied_embedding_is_counted_once() -> None:
    assert B1.total == 1_235_814_400
    assert (B1.head, B1.tied) == (0, True)
    assert B8.root == 2 * 128256 * 4096 + 4096


def test_model_sizes_latent_attention_has_all_kv_heads() -> None:
    config = {**SMALL, **LATENT, "model_type": "deepseek_v3", "num_key_value_heads": 8}
    sizes = ModelSizes.from_config(config)
    assert (sizes.kv_heads, sizes.key_size, sizes.value_size) == (8, 10, 5)


def test_window_of_every_kind_of_config() -> None:
    windowed = {**SMALL, "sliding_window": 16}

    def windows(**more: Any) -> list[int | None]:
        return [layer.window for layer in ModelSizes.from_config({**windowed, **more}).layers]

    assert windows(model_type="mistral") == [16] * 4
    assert windows(model_type="mistral", sliding_window=None) == [None] * 4
    assert windows(model_type="gemma2") == [16, None, 16, None]
    assert windows(model_type="qwen2", use_sliding_window=False) == [None] * 4
    assert windows(model_type="qwen2", use_sliding_window=True, max_window_layers=3) == [None, None, None, 16]
    types = ["full_attention", "sliding_attention"] * 2
    assert windows(model_type="gpt_oss", layer_types=types) == [None, 16, None, 16]


def test_with_lora_trains_adapters_only() -> None:
    sizes = B8.with_lora(16)
    assert sizes.trainable == 41_943_040
    assert sizes.total == B8.total + 41_943_040
    assert sizes.trainable_share == pytest.approx(0.0052, abs=1e-4)
    assert B8.trainable_share == 1


def test_model_sizes_text_config_is_read() -> None:
    assert ModelSizes.from_config({"model_type": "gemma3", "text_config": LLAMA_8B}) == B8


@pytest.mark.parametrize("kind", WITH_DEFAULTS)
def test_text_config_defaults_equal_transformers(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    ours = ModelSizes.from_config({"model_type": "some_vl", "text_config": {"model_type": kind}})
    assert ours == ModelSizes.from_config(config.to_dict())
    assert (
        common_config({"text_config": {"model_type": kind}})["max_position_embeddings"]
        == config.max_position_embeddings
    )


def test_text_config_of_gemma3_has_defaults() -> None:
    """The config of gemma-3-4b-it on the hub leaves out default values."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    sizes = ModelSizes.from_config(
        {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    )
    assert (sizes.name, sizes.heads, sizes.kv_heads, sizes.vocabulary) == ("gemma3_text", 8, 4, 262_208)
    assert sizes.total == 3_880_263_168
    # At the top of a config nothing is left out, and nothing is made up.
    with pytest.raises(UnsupportedError, match="no num_attention_heads, vocab_size"):
        ModelSizes.from_config({"model_type": "gemma3_text", **text})


def test_model_sizes_without_config_keys_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="hidden_size, num_hidden_layers"):
        ModelSizes.from_config({"vocab_size": 3})
    with pytest.raises(UnsupportedError, match="rank 0"):
        B8.with_lora(0)
