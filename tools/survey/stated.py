"""Hand-written facts about types, which the survey takes from this table rather than from a run.

A row names properties of a type's modules that its config does not hold. Gates, norms and switches of types whose
parameters plans count are measured (`measured.py`); the table has them for other types alone. `--facts --write` puts the
rows into `architectures.json`, from which plans are counted. Tests compare the table with transformers' modules:
parameters to a percent (`tests/planning/model`), windows layer by layer, defaults value by value.
"""

from __future__ import annotations

from typing import Any

from ithaca.planning.model.architectures import ArchitectureFacts

# Types whose parameters can be counted from the config, at any size.
_COUNTED = (
    "apertus", "arcee", "aria_text", "bitnet", "cohere", "cohere2", "cwm", "deepseek_v2",
    "deepseek_v3", "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "flint",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt-sw3", "gpt2", "gpt_bigcode",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "helium",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "llama", "mellum", "minicpm3", "minimax_m2",
    "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3",
    "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip
_TIED = (
    "cohere", "cohere2", "cohere2_moe", "cohere2_vision_text", "cohere_compass_text", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_assistant", "gemma4_text", "gemma4_unified",
    "gemma4_unified_assistant", "gemma4_unified_text", "gpt2", "gpt_bigcode",
)  # fmt: skip
# Types with biases in norms and linear layers.
_BIASED = ("starcoder2", "gpt2", "gpt_bigcode")
_UNGATED = ("biogpt", "gpt_neox", "nemotron", "persimmon", "phi")
_HEAD_NORMS = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "gemma3_text", "gemma3"), "head"),
    **dict.fromkeys(("olmo2", "olmo3"), "heads"),
    **dict.fromkeys(
        (
            "apertus", "exaone4", "exaone_moe", "flex_olmo", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2",
            "nanochat", "olmoe",
        ),
        "other",
    ),
}  # fmt: skip
_SANDWICHED = ("gemma2", "gemma3_text", "gemma3", "glm4")
_NORM_AFTER_MLP = (*_SANDWICHED, "olmo2", "olmo3")
_CENTRED = ("cohere2_moe",)
_ONE_NORM = (*_CENTRED, "phi")
_NORMS_IN_FP32 = (*_CENTRED, "gemma3")
_FULL_LAST = {
    "afmoe": 4, "cohere2": 4, "cohere2_moe": 4, "exaone4": 4, "exaone_moe": 4, "gemma2": 2, "gemma3": 6, "gemma3_text": 6,
    "gemma4": 6, "gemma4_text": 6, "gpt_oss": 2, "olmo3": 4, "vaultgemma": 2,
}  # fmt: skip
_FULL_FIRST = {"cwm": 4, "granite_swa": 4, "granitemoe_swa": 4, "modernbert-decoder": 3}
_DEFAULT_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings", "sliding_window", "tie_word_embeddings",
)  # fmt: skip
# Defaults of text models, which multimodal configs leave out.
_DEFAULTS = {
    "llama": (4096, 32, 32, None, None, 11008, 32000, 2048, None, False),
    "mistral": (4096, 32, 32, 8, None, 14336, 32000, 131072, 4096, False),
    "qwen2": (4096, 32, 32, 32, None, 22016, 151936, 32768, None, False),
    "qwen3": (4096, 32, 32, 32, 128, 22016, 151936, 32768, None, False),
    "gemma": (3072, 28, 16, 16, 256, 24576, 256000, 8192, None, True),
    "gemma2": (2304, 26, 8, 4, 256, 9216, 256000, 8192, 4096, True),
    "gemma3_text": (2304, 26, 8, 4, 256, 9216, 262208, 131072, 4096, True),
}


def stated(kind: str) -> dict[str, Any]:
    """Return the facts about a type that differ from Llama's."""
    values = zip(_DEFAULT_KEYS, _DEFAULTS.get(kind, ()), strict=False)
    facts = {
        "counted": kind in _COUNTED,
        "linked": kind != "hrm_text",
        "learned_positions": kind in ("gpt2", "gpt_bigcode"),
        "tied": kind in _TIED,
        "attention_bias": kind == "gpt_oss",
        "qkv_bias": kind in ("qwen2", "qwen2_moe"),
        "sinks": kind == "gpt_oss",
        "biased": kind in _BIASED,
        "head_norms": _HEAD_NORMS.get(kind, ""),
        "sandwiched": kind in _SANDWICHED,
        "norm_after_mlp": kind in _NORM_AFTER_MLP,
        "one_norm": kind in _ONE_NORM,
        "norms_in_fp32": kind in _NORMS_IN_FP32,
        "centred": kind in _CENTRED,
        "gated": kind not in _UNGATED,
        "full_width_experts": kind in ("mixtral", "gpt_oss"),
        "expert_biases": kind == "gpt_oss",
        "full_last": _FULL_LAST.get(kind, 0),
        "full_first": _FULL_FIRST.get(kind, 0),
        "defaults": {key: value for key, value in values if value is not None} or None,
    }
    llama = ArchitectureFacts()
    return {name: value for name, value in facts.items() if value != getattr(llama, name)}


def stated_kinds() -> set[str]:
    """Return every type that the table has a fact about."""
    tables = (_COUNTED, _TIED, _UNGATED, _HEAD_NORMS, _NORM_AFTER_MLP, _ONE_NORM, _NORMS_IN_FP32, _FULL_LAST)
    return {kind for table in (*tables, _FULL_FIRST, _DEFAULTS, ("hrm_text",)) for kind in table}
