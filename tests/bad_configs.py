"""Values of a config.json that no model can be built with, for every verb that reads a model's folder."""

from __future__ import annotations

from typing import Any

_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip
_ROPES: dict[str, Any] = {
    "unknown": {"rope_type": "wobble"},
    "no_type": {"rope_type": None},
    "linear_without_factor": {"rope_type": "linear"},
    "dynamic_without_factor": {"rope_type": "dynamic"},
    "yarn_without_factor": {"rope_type": "yarn"},
    "llama3_without_frequencies": {"rope_type": "llama3", "factor": 8.0},
    "longrope_without_factors": {"rope_type": "longrope"},
    "longrope_with_too_few": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    "factor_in_words": {"rope_type": "yarn", "factor": "8"},
    "negative_factor": {"rope_type": "linear", "factor": -8.0},
    "no_original_positions": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
    "beta_in_words": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "fast"},
    "theta_of_zero": {"rope_theta": 0},
    "theta_of_null": {"rope_theta": None},
    "share_above_one": {"rope_type": "default", "partial_rotary_factor": 7.0},
    "list": [],
    "word": "yarn",
}
# What a Llama's config.json is changed by. The key that an error names is the last word of what stands here.
BAD_VALUES: dict[str, dict[str, Any]] = {
    **{f"{key}={value}": {key: value} for key in _SIZES for value in (0, -1, 2.5, 64.0, "8", True, 10**30, [8])},
    **{f"{key}=null": {key: None} for key in _SIZES if key not in ("num_key_value_heads", "head_dim")},
    **{f"hidden_act={value}": {"hidden_act": value} for value in ("wobble", 5, "", ["silu"], None)},
    **{f"rope_{name}": {"rope_parameters": value} for name, value in _ROPES.items()},
    "rope_scaling": {"rope_scaling": {"rope_type": "wobble", "factor": 2.0}},
    **{
        f"layer_types={value}": {"layer_types": value}
        for value in (["full_attention"], ["wobble", "wobble"], "full_attention", [], [1, 2])
    },
    **{f"heads_over_{count}": {"num_attention_heads": 4, "num_key_value_heads": count} for count in (3, 7)},
    "heads_that_do_not_divide": {"hidden_size": 33, "head_dim": None},
    "odd_heads": {"head_dim": 7},
    **{f"rms_norm_eps={value}": {"rms_norm_eps": value} for value in (-1, "small", None, float("nan"))},
    "initializer_range=-1": {"initializer_range": -1.0},
    **{f"attention_dropout={value}": {"attention_dropout": value} for value in (-0.5, 2.0, "some", None)},
    **{f"pad_token_id={value}": {"pad_token_id": value} for value in (10**6, "x", 1.5)},
    "eos_token_id=x": {"eos_token_id": "x"},
    "dtype=wobble": {"dtype": "wobble"},
    "torch_dtype=wobble": {"torch_dtype": "wobble"},
    "tie_word_embeddings=5": {"tie_word_embeddings": 5},
    "use_cache=x": {"use_cache": "x"},
    "id2label=5": {"id2label": 5},
    "text_config": {"text_config": []},
    "model_type": {"model_type": "wobble"},
    "model_type_of_no_text": {"model_type": "vit"},
    "model_type_of_a_number": {"model_type": 5},
    "code_in_the_folder": {"model_type": "wobble", "auto_map": {"AutoConfig": "own.Own"}},
    "quantization": {"quantization_config": {"quant_method": "fp8"}},
}
# What stands in the file instead of a config; None: there is no file.
BAD_FILES: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "cut": b'{"model_type": "ll',
    "list": b"[]",
    "number": b"5",
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "digits": b'{"model_type": "llama", "hidden_size": ' + b"9" * 6_000 + b"}",
    "no_type": b"{}",
}
