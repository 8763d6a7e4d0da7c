"""Small models with random weights: every feature of an architecture, few numbers.

    small_model("gemma2")                       two layers, 8 / 2 heads, hidden size 32, fp64
    small_model("llama", num_hidden_layers=3)   settings of the config win

Windows are shorter than the tests' rows, softcaps and sinks change the result, RoPE types are the config's own.
`small_model` takes any causal-LM `model_type`; `_OWN` holds what an architecture needs beyond the common sizes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ithaca.constants import IGNORE_INDEX

VOCABULARY = 61
WINDOW = 5

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
_OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {**_EXPERTS, "sliding_window": WINDOW},
    "qwen2": _QWEN_WINDOW,
    "qwen3": _QWEN_WINDOW,
    "qwen3_moe": {**_EXPERTS, **_QWEN_WINDOW, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma2": {**_WINDOWED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_WINDOWED, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": WINDOW, "original_max_position_embeddings": 128},
    "olmo3": _WINDOWED,
    "cohere2": _WINDOWED,
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "smollm3": {
        "no_rope_layers": [1, 0], "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW,
    },
    "gpt_oss": {**_EXPERTS, **_WINDOWED},
    "starcoder2": {"sliding_window": WINDOW},
    "stablelm": {"hidden_size": 64, "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "deepseek_v3": {
        "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "head_dim": 4, "num_key_value_heads": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },
}  # fmt: skip

LISTED = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2",
    "olmo3", "granite", "smollm3", "gpt_oss", "glm4", "cohere2", "starcoder2", "stablelm", "nemotron", "deepseek_v3",
)  # fmt: skip
WITH_EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


def small_config(kind: str, **overrides: Any) -> PreTrainedConfig:
    """Return the architecture's config at small sizes; `overrides` win."""
    settings = {**_COMMON, **_OWN.get(kind, {}), **overrides}
    if "num_attention_heads" in overrides and "hidden_size" not in overrides:
        # Architectures without a head_dim of their own divide the hidden size by the heads.
        settings["hidden_size"] = settings["num_attention_heads"] * settings["head_dim"]
    for key in ("layer_types", "no_rope_layers"):
        if key in settings and key not in overrides:
            kinds = settings[key]
            settings[key] = [kinds[i % len(kinds)] for i in range(settings["num_hidden_layers"])]
    return AutoConfig.for_model(kind, **settings)


def small_model(kind: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a small model in training mode, its weights a function of the seed."""
    return build(small_config(kind, **overrides), dtype=dtype, seed=seed)


def build(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """Return a model of `config` with random weights in training mode."""
    config = copy.deepcopy(config)
    # The only implementation of experts that runs in fp64.
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms start at 0 and 1, where a wrong gradient of another weight may not show.
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def small_batch(
    batch: int = 1, length: int = 23, *, seed: int = 0, vocabulary: int = VOCABULARY, learned: float = 0.8
) -> dict[str, torch.Tensor]:
    """Return random ids and labels; about a fifth of the labels are -100."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (batch, length), generator=generator)
    keep = torch.rand(batch, length, generator=generator) < learned
    return {"input_ids": ids, "labels": ids.masked_fill(~keep, IGNORE_INDEX)}
