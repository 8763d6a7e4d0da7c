"""A config.json under the names and with the defaults that sizes are read from.

Older families have names of their own, and what stands inside another config (the text model of one that also sees
images) is written without what transformers fills in by itself. Nothing is imported to know that: a test holds the
table to transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ithaca.errors import UnsupportedError

Config = Mapping[str, Any]
# GPT-2's names, and those of families after it.
NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}
# Families whose positions are a table of weights: no length beyond it, whatever the rotation.
LEARNED_POSITIONS = ("gpt2", "gpt_bigcode")
# Families whose layers stand in stacks between which hidden states are added up: the first input of each is no output.
UNLINKED = ("hrm_text",)
# What attention dropout is called; it is not exact over ranks.
ATTENTION_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attention_dropout_prob",
)
# Families whose parameters are counted right from a config, at any size; a test holds them to transformers' own modules.
COUNTED = frozenset((
    "apertus", "arcee", "aria_text", "bitnet", "cohere", "cohere2", "cwm", "deepseek_v2",
    "deepseek_v3", "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "flint",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt-sw3", "gpt2", "gpt_bigcode",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "helium",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "llama", "mellum", "minicpm3", "minimax_m2",
    "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3",
    "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
))  # fmt: skip
_TOWERS = ("vision_config", "audio_config", "speech_config")
# The text model inside, where its config does not say.
_TEXT_TYPES = {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral"}
_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "tie_word_embeddings",
)
# transformers' defaults of those keys, for the text models that stand inside others.
DEFAULTS: dict[str, dict[str, Any]] = {
    kind: {key: value for key, value in zip(_KEYS, values, strict=True) if value is not None}
    for kind, values in {
        "llama": (4096, 32, 32, None, None, 11008, 32000, 2048, None, False),
        "mistral": (4096, 32, 32, 8, None, 14336, 32000, 131072, 4096, False),
        "qwen2": (4096, 32, 32, 32, None, 22016, 151936, 32768, None, False),
        "qwen3": (4096, 32, 32, 32, 128, 22016, 151936, 32768, None, False),
        "gemma": (3072, 28, 16, 16, 256, 24576, 256000, 8192, None, True),
        "gemma2": (2304, 26, 8, 4, 256, 9216, 256000, 8192, 4096, True),
        "gemma3_text": (2304, 26, 8, 4, 256, 9216, 262208, 131072, 4096, True),
    }.items()
}


def text_of(config: Config) -> dict[str, Any]:
    """The text model's part of `config` under the usual names; what it leaves to transformers is filled in."""
    inner = config.get("text_config")
    named = dict(config) if inner is None else dict(inner)
    if inner is not None:
        outer = str(config.get("model_type", ""))
        named.setdefault("model_type", _TEXT_TYPES.get(outer, outer))
        named = DEFAULTS.get(str(named["model_type"]), {}) | named
    for old, usual in NAMES.items():
        if old in named and named.get(usual) is None:
            named[usual] = named[old]
    if "n_embd" in named and not named.get("intermediate_size"):
        named["intermediate_size"] = 4 * int(named["n_embd"])
    if named.get("multi_query") and (named.get("model_type") == "gpt_bigcode" or not named.get("num_key_value_heads")):
        named["num_key_value_heads"] = 1
    return named


def of_layer(config: Config, index: int) -> dict[str, Any]:
    """The config as layer `index` has it: some families have head sizes and counts of their own for some layers."""
    own = config.get("per_layer_config") or {}
    return {**config, **(own.get(str(index)) or own.get(index) or {})}


def widest(config: Config) -> dict[str, Any]:
    """The config with the largest head size and the most key-value heads of any layer."""
    every = [config, *(config.get("per_layer_config") or {}).values()]
    keys = ("head_dim", "num_key_value_heads")
    most = {key: max(own[key] for own in every if own.get(key)) for key in keys if any(own.get(key) for own in every)}
    return {**config, **most}


def counted_by_names(config: Config) -> bool:
    """Whether sizes follow from the config alone; else a model must be built to count them."""
    return str(text_of(config).get("model_type", "")) in COUNTED


def cautions_of(config: Config, *, built: bool = False) -> dict[str, str]:
    """What a plan for this config does not cover, or a run of it will refuse. `built`: sizes are the model's own."""
    found, kind = {}, str(config.get("model_type", "")) or "this model"
    if config.get("text_config") is not None or any(config.get(tower) for tower in _TOWERS):
        found["text only"] = f"the text model inside {kind} is planned, and nothing else that it has"
    text = text_of(config)
    inside = str(text.get("model_type", ""))
    if built:
        found["sizes"] = (
            f"parameters are those of transformers' own modules of {inside or kind!r}, built without weights; activations "
            "are planned as a Llama's of these widths: `ithaca rehearse` runs the model itself"
        )
    elif inside not in COUNTED:
        found["sizes"] = (
            f"parameters and windows of {inside or kind!r} are counted as Llama's and may be off: `ithaca rehearse` "
            "counts the model itself"
        )
    for key in ATTENTION_DROPOUTS:
        value = text.get(key) or 0
        if isinstance(value, int | float) and value > 0:
            found["dropout"] = (
                f"{key} is {value:g}: attention dropout is not exact over ranks, train with model.config.{key}=0"
            )
    return found


def refuse_attention_dropout(values: Callable[[str], object]) -> None:
    """UnsupportedError with every attention dropout that is on; `values` gives a config's value by its key."""
    found = {
        key: value
        for key in ATTENTION_DROPOUTS
        if isinstance(value := values(key), int | float) and not isinstance(value, bool) and value > 0
    }
    if not found:
        return
    named = ", ".join(f"config.{key}={value}" for key, value in found.items())
    typed = " ".join(f"model.config.{key}=0" for key in found)
    passed = ", ".join(f"{key}=0.0" for key in found)
    raise UnsupportedError(
        f"{named}: attention dropout is not exact over ranks, set it to 0: type {typed} beside the run file or --model, or "
        f"in Python from_pretrained(..., {passed})"
    )
