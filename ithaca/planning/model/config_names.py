"""Config values under common names and with defaults, as the counting of sizes reads them.

    common_config({"model_type": "gpt2", "n_embd": 768, ...})       {"hidden_size": 768, "intermediate_size": 3072, ...}
    common_config({"text_config": {"model_type": "llama"}})         {"hidden_size": 4096, ...}

Older families use names of their own. A text model's config inside a multimodal config leaves out transformers' defaults,
which are filled in from `architectures.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ithaca.errors import UnsupportedError
from ithaca.planning.model.architectures import facts_of

Config = Mapping[str, Any]
# Names in the configs of GPT-2 and its successors.
NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}
# Config keys for attention dropout, which is not exact over ranks.
ATTENTION_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attention_dropout_prob",
)
_TOWERS = ("vision_config", "audio_config", "speech_config")
# Types of text models whose config leaves out its model_type, by the outer type.
_TEXT_TYPES = {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral"}


def common_config(config: Config) -> dict[str, Any]:
    """Return the text model's part of `config` under common names, with transformers' defaults filled in."""
    inner = config.get("text_config")
    named = dict(config) if inner is None else dict(inner)
    if inner is not None:
        outer = str(config.get("model_type", ""))
        named.setdefault("model_type", _TEXT_TYPES.get(outer, outer))
        named = dict(facts_of(str(named["model_type"])).defaults or {}) | named
    for old, common in NAMES.items():
        if old in named and named.get(common) is None:
            named[common] = named[old]
    if "n_embd" in named and not named.get("intermediate_size"):
        named["intermediate_size"] = 4 * int(named["n_embd"])
    if named.get("multi_query") and (named.get("model_type") == "gpt_bigcode" or not named.get("num_key_value_heads")):
        named["num_key_value_heads"] = 1
    return named


def layer_config(config: Config, index: int) -> dict[str, Any]:
    """Return the config of layer `index`: some families have other head sizes and head counts in some layers."""
    own = config.get("per_layer_config") or {}
    return {**config, **(own.get(str(index)) or own.get(index) or {})}


def widest(config: Config) -> dict[str, Any]:
    """Return the config with the largest head size and the most key-value heads of any layer."""
    every = [config, *(config.get("per_layer_config") or {}).values()]
    keys = ("head_dim", "num_key_value_heads")
    most = {key: max(own[key] for own in every if own.get(key)) for key in keys if any(own.get(key) for own in every)}
    return {**config, **most}


def counted_by_names(config: Config) -> bool:
    """True if sizes can be counted from the config; otherwise a model must be built to count them."""
    return facts_of(str(common_config(config).get("model_type", ""))).counted


def cautions_of(config: Config, *, built: bool = False) -> dict[str, str]:
    """Return warnings about a plan for this config, by subject; `built`: sizes were counted on the built model."""
    found, kind = {}, str(config.get("model_type", "")) or "this model"
    if config.get("text_config") is not None or any(config.get(tower) for tower in _TOWERS):
        found["text only"] = f"the text model inside {kind} is planned, and nothing else that it has"
    text = common_config(config)
    inside = str(text.get("model_type", ""))
    if built:
        found["sizes"] = (
            f"parameters are those of transformers' own modules of {inside or kind!r}, built without weights; activations "
            "are planned as a Llama's of these widths: `ithaca rehearse` runs the model itself"
        )
    elif not facts_of(inside).counted:
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


def refuse_attention_dropout(read: Callable[[str], object]) -> None:
    """Raise UnsupportedError if an attention dropout is above 0; `read` returns a config's value by its key."""
    found = {
        key: value
        for key in ATTENTION_DROPOUTS
        if isinstance(value := read(key), int | float) and not isinstance(value, bool) and value > 0
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
