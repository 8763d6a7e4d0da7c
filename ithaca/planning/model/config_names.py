"""A config.json under the names and with the defaults that sizes are read from.

Older families have names of their own. The config of a text model inside another config leaves out transformers'
defaults, which are filled in from `architectures.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ithaca.errors import UnsupportedError
from ithaca.planning.model.architectures import facts_of

Config = Mapping[str, Any]
# GPT-2's names, and those of families after it.
NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}
# What attention dropout is called; it is not exact over ranks.
ATTENTION_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attention_dropout_prob",
)
_TOWERS = ("vision_config", "audio_config", "speech_config")
# The text model inside, where its config does not say.
_TEXT_TYPES = {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral"}


def text_of(config: Config) -> dict[str, Any]:
    """The text model's part of `config` under the usual names; what it leaves to transformers is filled in."""
    inner = config.get("text_config")
    named = dict(config) if inner is None else dict(inner)
    if inner is not None:
        outer = str(config.get("model_type", ""))
        named.setdefault("model_type", _TEXT_TYPES.get(outer, outer))
        named = dict(facts_of(str(named["model_type"])).defaults or {}) | named
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
    return facts_of(str(text_of(config).get("model_type", ""))).counted


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
