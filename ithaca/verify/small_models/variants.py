"""Small configs with the features that a type's own defaults switch off, or leave at a value that changes nothing.

Biases, norms of queries and keys, multipliers that are not 1, tied weights, softcaps, experts' scales, other routers:
`features_on(kind)` uses all of them at once, so that the survey judges them too. `_OWN` holds features of single types,
such as shared keys and values or heads of another size in some layers; `_NOT` what a type's code cannot run.
"""

from __future__ import annotations

from typing import Any

from ithaca.verify.small_models.types import survey_config

# Switches, set to the other position where a config has them; then attributes with their new values.
_FLIPPED = (
    "attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_qkv_bias", "norm_bias", "qkv_bias", "use_qk_norm",
    "qk_layernorm", "norm_topk_prob", "use_parallel_residual", "mup_enabled", "use_post_norm", "tie_word_embeddings",
    "multi_query", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "scale_embedding", "use_task_id",
    "moe_apply_router_weight_on_input", "attention_k_eq_v", "use_double_wide_mlp", "rope_interleave", "decoder_bias",
    "enable_moe_fp32_combine", "enable_moe_block",
)  # fmt: skip
_VALUES: dict[str, Any] = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "attention_value_scale": 0.6,
    "logit_scale": 0.5,
    "scale_emb": 3.0,
    "scale_depth": 0.7,
    "dim_model_base": 32,
    "routed_scaling_factor": 1.7,
    "router_scaling_factor": 1.7,
    "moe_routed_scaling_factor": 1.7,
    "route_scale": 1.7,
    "moe_router_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 1.5,
    "clip_qkv": 0.2,
    "swiglu_limit": 0.3,
    "query_pre_attn_scalar": 16,
    "shared_expert_combination_strategy": "sum",
    "expert_selection_fn": "sigmoid",
}
_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "num_global_key_value_heads": 4,
}
_OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": _SHARED,
    "gemma4_unified_text": _SHARED,
    "hrm_text": {"L_bp_cycles": [1, 3], "embedding_scale": 1.5, "num_key_value_heads": 8},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "cohere2_moe": {"mlp_layer_types": ["dense", "sparse"], "prefix_dense_intermediate_size": 24},
    "laguna": {"num_attention_heads_per_layer": [8, 4]},
}
_NOT = {
    "dbrx": ("tie_word_embeddings",),
    # Attention that is cast to fp32 takes no fp64 in transformers.
    **dict.fromkeys(("gpt2", "gpt-sw3"), ("reorder_and_upcast_attn",)),
    "laguna": ("moe_apply_router_weight_on_input",),
}


def features_on(kind: str) -> dict[str, Any]:
    """Return overrides for `survey_config`; empty if a type's defaults leave no feature off."""
    config = survey_config(kind).to_dict()
    left_out = _NOT.get(kind, ())
    found = {key: not config[key] for key in _FLIPPED if isinstance(config.get(key), bool)}
    found |= {key: value for key, value in _VALUES.items() if key in config and config[key] != value}
    return {key: value for key, value in found.items() if key not in left_out} | _OWN.get(kind, {})
