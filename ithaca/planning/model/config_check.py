"""Checks of a config.json's values, without torch or transformers: values that no model can be built with are refused.

`ithaca plan` answers within a second and imports neither library, so transformers' names for activations, RoPE and layers
are copied into `config_words`. `models/files/pretrained.py` runs the same checks with transformers' own names before
building a model. A test builds the configs that these checks pass, and compares the names with transformers'.

Example: `check_config({"model_type": "llama", "hidden_act": "silo", ...})` raises ConfigError: "hidden_act: got 'silo',
and transformers knows no such activation; the nearest is 'silu'".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

from ithaca.errors import ConfigError, UnsupportedError
from ithaca.planning.model import config_words
from ithaca.planning.model.architectures import EXPERT_COUNTS

Config = Mapping[str, Any]
# Sizes that must be at least 1, under the names of all families. The upper bounds are above those of any real model:
# transformers makes a list entry for every layer, and torch counts bytes in 63 bits.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_HEADS = (
    "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "num_kv_heads",
    "decoder_attention_heads", "encoder_attention_heads",
)  # fmt: skip
_WIDTHS = (
    "hidden_size", "intermediate_size", "head_dim", "n_embd", "n_inner", "d_model", "d_ff", "ffn_dim", "ffn_hidden_size",
    "decoder_ffn_dim", "encoder_ffn_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "moe_intermediate_size", "word_embed_proj_dim",
)  # fmt: skip
_POSITIONS = ("max_position_embeddings", "n_positions", "original_max_position_embeddings")
_MOST: dict[str, int] = {
    **dict.fromkeys(_LAYERS, 10_000),
    **dict.fromkeys(_HEADS, 100_000),
    **dict.fromkeys(_WIDTHS, 10_000_000),
    **dict.fromkeys(_POSITIONS, 10**12),
    "vocab_size": 100_000_000,
}
# Counts that may be 0.
_COUNTS = (
    *EXPERT_COUNTS, "num_experts_per_tok", "n_shared_experts", "sliding_window",
    "q_lora_rank", "kv_lora_rank", "first_k_dense_replace", "num_kv_shared_layers",
)  # fmt: skip
_MOST_COUNTED = 10**12
_ACTIVATIONS = (
    "hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "mamba_hidden_act", "hidden_mamba_act",
    "ff_activation", "afn", "activation",
)  # fmt: skip
_NOT_BELOW_0 = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "initializer_range",
)  # fmt: skip
_ROPES = ("rope_parameters", "rope_scaling")
# Fields that transformers needs to compute the frequencies of each kind of RoPE.
_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_ABOVE_0 = ("rope_theta", "rotary_emb_base", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor")
# Optional numbers of a RoPE.
_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "qkv_bias", "bias")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Keys that must not be null; for other keys null means the default.
_NOT_NULL = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings",
    "intermediate_size", "rms_norm_eps", "initializer_range", "attention_dropout", "tie_word_embeddings", "n_embd",
    "n_layer", "n_head", "n_positions",
)  # fmt: skip
_WIDTH_OF_HEADS = (("num_attention_heads", "n_head"), ("hidden_size", "n_embd"))
# The largest odd head size: transformers' own test models have such heads.
_ODD_HEAD = 4


@dataclass(frozen=True, slots=True)
class KnownWords:
    """The names that transformers knows: model types with a causal language model, activations, RoPE, layers."""

    causal: frozenset[str]
    activations: frozenset[str]
    ropes: frozenset[str]
    layers: frozenset[str]


WORDS = KnownWords(config_words.CAUSAL, config_words.ACTIVATIONS, config_words.ROPES, config_words.LAYERS)


def read_content(file: Path) -> dict[str, Any]:
    """Return the content of a config.json; raise ConfigError, without the file's name, if it holds no JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"it cannot be read as JSON ({error or 'the file is empty'})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"it holds {_shown(content)}, and a config.json is an object")
    return content


def check_config(config: Config, words: KnownWords = WORDS) -> None:
    """Raise ConfigError or UnsupportedError for the first value that no model can be built with."""
    _check_kind(config, words)
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise ConfigError(f"text_config: got {_shown(inner)}, and an object is needed")
    for part, where in ((config, ""), (inner or {}, "text_config.")):
        try:
            _check_numbers(part)
            _check_types(part)
            _check_heads(part)
            _check_words(part, words)
            _check_rope(part, words)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from None


def _check_kind(config: Config, words: KnownWords) -> None:
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ConfigError("it has no model_type, and a transformers model is needed")
    if kind not in words.causal:
        own = " (its code is in the folder, and code from outside is not run)" if "auto_map" in config else ""
        near = get_close_matches(kind, words.causal, 1)
        raise UnsupportedError(
            f"its model_type is {kind!r}, which transformers has no causal language model for{own}: "
            f"{f'the nearest is {near[0]!r}, and ' if near else ''}`ithaca models` lists what can be trained"
        )
    if config.get("quantization_config"):
        raise UnsupportedError("it has quantized weights (quantization_config): name the model in bf16 or fp32 instead")


def _check_numbers(config: Config) -> None:
    for key in _NOT_NULL:
        if key in config and config[key] is None and config.get("model_type") not in config_words.NULLS.get(key, ()):
            raise ConfigError(f"{key}: got null: leave it out, or give it a value")
    for key, most in _MOST.items():
        for value in _each(config, key):
            if not _is_int(value) or not 1 <= value <= most:
                raise ConfigError(f"{key}: got {_shown(value)}, and a whole number from 1 to {most:,} is needed")
    for key in _COUNTS:
        for value in _each(config, key):
            if not _is_int(value) or not 0 <= value <= _MOST_COUNTED:
                raise ConfigError(f"{key}: got {_shown(value)}, and a whole number from 0 on is needed")
    for key in _NOT_BELOW_0:
        if config.get(key) is not None and not _number(config[key]) >= 0:
            raise ConfigError(f"{key}: got {_shown(config[key])}, and a finite number from 0 on is needed")
    for key, value in config.items():
        if key.endswith(("dropout", "pdrop")) and value is not None and not 0 <= _number(value) <= 1:
            raise ConfigError(f"{key}: got {_shown(value)}, and a share from 0 to 1 is needed")


def _check_types(config: Config) -> None:
    for key in _SWITCHES:
        if not isinstance(config.get(key), bool | None):
            raise ConfigError(f"{key}: got {_shown(config[key])}, and true or false is needed")
    size = config.get("vocab_size")
    for key in _TOKENS:
        value = config.get(key)
        several = isinstance(value, list) and key == "eos_token_id"
        if value is not None and not all(_is_int(one) for one in (value if several else [value])):
            raise ConfigError(f"{key}: got {_shown(value)}, and a token's number is needed")
        if key == "pad_token_id" and _is_int(value) and _is_int(size) and not -size <= value < size:
            raise ConfigError(f"pad_token_id: got {value} of a vocabulary of {size:,} tokens (vocab_size)")
    if not isinstance(config.get("id2label"), Mapping | None):
        raise ConfigError(f"id2label: got {_shown(config['id2label'])}, and an object is needed")
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if isinstance(value, str) and value not in config_words.DTYPES:
            raise ConfigError(f"{key}: {_unknown(value, config_words.DTYPES, 'type of weights', 'torch')}")


def _check_heads(config: Config) -> None:
    heads, width = (config.get(key, config.get(old)) for key, old in _WIDTH_OF_HEADS)
    kv_heads = config.get("num_key_value_heads")
    if _is_int(heads) and _is_int(kv_heads) and heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads: got {heads} over {kv_heads} num_key_value_heads, which must divide them"
        )
    size = config.get("head_dim")
    if _is_int(size) and size > _ODD_HEAD and size % 2 and _rotates_whole_heads(config):
        raise ConfigError(f"head_dim: got {size}, and RoPE rotates pairs: an even number is needed")
    if config.get("model_type") in config_words.DIVIDES_HEADS and _is_int(heads) and _is_int(width) and width % heads:
        raise ConfigError(f"hidden_size: got {width} over {heads} heads, which must divide it")


def _rotated(config: Config, share: float) -> int | None:
    """Return the number of a head's dimensions that RoPE rotates; None if the config does not determine it."""
    heads, width = (config.get(key) for key in ("num_attention_heads", "hidden_size"))
    if config.get("kv_lora_rank") is not None or not (_is_int(heads) and _is_int(width)):
        return None
    size = config.get("head_dim") or width // heads
    return int(size * share) if _is_int(size) else None


def _rotates_whole_heads(config: Config) -> bool:
    rope: Config = next((config[key] for key in _ROPES if isinstance(config.get(key), Mapping)), {})
    return rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) in (1, None)


def _check_words(config: Config, words: KnownWords) -> None:
    for key in _ACTIVATIONS:
        value = config.get(key)
        # Gemma's older configs leave one of two names null.
        needed = key == "hidden_act" and key in config and "hidden_activation" not in config
        if (value is not None or needed) and (not isinstance(value, str) or value not in words.activations):
            raise ConfigError(f"{key}: {_unknown(value, words.activations, 'activation')}")
    kinds, count = config.get("layer_types"), config.get("num_hidden_layers", config.get("n_layer"))
    if kinds is None:
        return
    if not isinstance(kinds, list):
        raise ConfigError(f"layer_types: got {_shown(kinds)}, and a list with a word for every layer is needed")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in words.layers:
            raise ConfigError(f"layer_types: {_unknown(kind, words.layers, 'kind of layer')}")
    if _is_int(count) and len(kinds) != count:
        raise ConfigError(f"layer_types: got {len(kinds)} words for {count} layers (num_hidden_layers)")


def _check_rope(config: Config, words: KnownWords) -> None:
    _check_positive(config, "")
    for key in _ROPES:
        given = config.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ConfigError(f"{key}: got {_shown(given)}, and an object such as {{'rope_type': 'default'}} is needed")
        share = _number(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
        if not 0 < share <= 1:
            raise ConfigError(
                f"{key}.partial_rotary_factor: got {share:g}, and a share above 0, of at most 1, is needed"
            )
        nested = {f"{key}.{inner}": one for inner, one in given.items() if inner in words.layers}
        for where, one in (nested or {key: given}).items():
            if isinstance(one, Mapping):
                _check_one_rope(one, where, words, _rotated(config, share))
            elif one is not None:
                raise ConfigError(f"{where}: got {_shown(one)}, and an object is needed")


def _check_one_rope(rope: Config, where: str, words: KnownWords, rotated: int | None) -> None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in words.ropes:
        raise ConfigError(f"{where}.rope_type: {_unknown(kind, words.ropes, 'RoPE')}")
    for field in _NEEDED.get(kind, ()):
        if rope.get(field) is None:
            raise ConfigError(f"{where}: RoPE of type {kind!r} needs {field}, and it is missing")
    if "rope_theta" in rope and rope["rope_theta"] is None:
        raise ConfigError(f"{where}.rope_theta: got null, and a number above 0 is needed")
    _check_positive(rope, f"{where}.")
    for field in _NUMBERS:
        if rope.get(field) is not None and math.isnan(_number(rope[field])):
            raise ConfigError(f"{where}.{field}: got {_shown(rope[field])}, and a number is needed")
    original = rope.get("original_max_position_embeddings")
    if original is not None and (not _is_int(original) or original < 1):
        raise ConfigError(
            f"{where}.original_max_position_embeddings: got {_shown(original)}, and a whole number above 0 is needed"
        )
    for field in ("short_factor", "long_factor"):
        factors = rope.get(field)
        if factors is not None and not (isinstance(factors, list) and all(_number(one) > 0 for one in factors)):
            raise ConfigError(f"{where}.{field}: got {_shown(factors)}, and a list of numbers above 0 is needed")
        if factors is not None and rotated is not None and len(factors) != rotated // 2:
            raise ConfigError(
                f"{where}.{field}: got a list of {len(factors)}, and RoPE over {rotated} dimensions has {rotated // 2} numbers"
            )


def _check_positive(values: Config, where: str) -> None:
    for field in _ABOVE_0:
        value = values.get(field)
        if value is not None and not _number(value) > 0:
            raise ConfigError(f"{where}{field}: got {_shown(value)}, and a finite number above 0 is needed")


def _each(config: Config, key: str) -> list[Any]:
    """Return the values of a size: one, one for each layer of a type that has such lists, or none for the default."""
    value = config.get(key)
    by_layer = isinstance(value, list) and str(config.get("model_type", "")).startswith(config_words.SIZES_BY_LAYER)
    return [] if value is None else value if by_layer else [value]


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """Return the value as a float; NaN, which fails every comparison, if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


def _unknown(value: Any, known: frozenset[str], what: str, who: str = "transformers") -> str:
    """Return the message for a name that `who` does not know, with the nearest known name."""
    near = get_close_matches(value, known, 1, 0.5) if isinstance(value, str) else []
    hint = f"the nearest is {near[0]!r}" if near else f"it knows {', '.join(sorted(known))}"
    return f"got {_shown(value)}, and {who} knows no such {what}; {hint}"


def _shown(value: Any) -> str:
    """Return the value as JSON of at most 60 characters: a config may hold a list of a million entries."""
    text = json.dumps(value, default=repr) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
