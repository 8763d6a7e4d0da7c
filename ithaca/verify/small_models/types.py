"""Small configs of every causal-LM type of transformers, for the survey and `ithaca verify --model TYPE`.

`survey_config` takes the listed architectures from `features.py`. Any other type starts from its config class's own
defaults: each attribute in `_SIZES` gets its small value, each kind of layer is kept once, windows are shorter than the
survey's rows, softcaps change the result, dropout is off. `_EXTRA` holds what a type needs beyond that.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ithaca.verify.small_models.features import LISTED, VOCABULARY, WINDOW, small_config

LAYERS = 2
HEADS = 8
HIDDEN = 64

# Attribute -> small value, used where the config class has that attribute.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "emb_dim"), HIDDEN),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), LAYERS
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2
    ),
    **dict.fromkeys(("head_dim", "swa_head_dim", "swa_v_head_dim", "global_head_dim", "rotary_dim", "kv_channels"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "dff"), 48),
    **dict.fromkeys(("ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("original_max_position_embeddings",), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers"), 1),
    **dict.fromkeys(("sliding_window", "window_size", "local_attention", "sliding_window_size"), WINDOW),
    "attention_chunk_size": WINDOW,
    "use_sliding_window": True,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 8,
    "initializer_range": 0.2,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DECODER = {"is_decoder": True}
_SHARED_KEYS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EXTRA: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"), _DECODER
    ),
    **dict.fromkeys(("megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roformer"), _DECODER),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), _DECODER),
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "roc_bert": {**_DECODER, "pronunciation_vocab_size": 61, "shape_vocab_size": 61},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 0.5},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 16, "hidden_size": HIDDEN},
    },
    "flint": {"mlp_only_layers": [0]},
    "cohere_compass_text": {
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    # Query scales that grow with the position, and do so within the survey's rows.
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 8,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    # Layers that reuse the keys and values of earlier ones.
    "gemma3n_text": {**_SHARED_KEYS, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0]},
    "gemma4_text": {**_SHARED_KEYS, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "longcat_flash": {"zero_expert_num": 1},
}  # fmt: skip
_LISTS = ("layer_types", "mlp_layer_types")


def survey_config(kind: str, **overrides: Any) -> PreTrainedConfig:
    """Return a small config of any causal-LM type; `overrides` win."""
    if kind in LISTED:
        return small_config(kind, **overrides)
    plain = AutoConfig.for_model(kind)
    nested = {key: shrunk(value) for key, value in plain.to_dict().items() if key in plain.sub_configs and value}
    return AutoConfig.for_model(kind, **{**shrunk(plain.to_dict()), **nested, **_EXTRA.get(kind, {}), **overrides})


def shrunk(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the small values of a config's attributes, for those that have one."""
    small = {key: _SIZES[key] for key in plain if key in _SIZES}
    small |= {key: 0.0 for key, value in plain.items() if "drop" in key and isinstance(value, float)}
    if "kv_lora_rank" in plain:
        # Latent attention (MLA): every head has its own key, and `head_dim` is the part that RoPE rotates.
        small |= {"num_key_value_heads": HEADS, "head_dim": small["qk_rope_head_dim"]}
    lists = {key: list(dict.fromkeys(plain[key])) for key in _LISTS if plain.get(key)}
    if "sliding_window" in plain and set(lists.get("layer_types", ())) == {"full_attention"}:
        lists["layer_types"] = ["sliding_attention", "full_attention"]
    layers = max([LAYERS, *map(len, lists.values())])
    small |= {key: [values[i % len(values)] for i in range(layers)] for key, values in lists.items()}
    small |= {key: layers for key in ("num_hidden_layers", "num_layers") if key in small}
    return small


def without_window(kind: str) -> dict[str, Any]:
    """Return overrides for `survey_config` that switch the sliding window of `kind` off."""
    config = survey_config(kind)
    off: dict[str, Any] = {"sliding_window": None, "use_sliding_window": False}
    if getattr(config, "layer_types", None):
        off["layer_types"] = ["full_attention"] * len(config.layer_types)
    return {key: value for key, value in off.items() if hasattr(config, key)}
