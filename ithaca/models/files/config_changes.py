"""Changes of a model's config by `model.config` of a run file, such as `attn_pdrop: 0`.

Weights stay the folder's: a change of their shapes is refused, and so is a setting that stands elsewhere in a run file.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ithaca.errors import ConfigError

_WHERE = "model.config"
# Settings that stand elsewhere in a run file, or that no run may change.
_ELSEWHERE = {
    **dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"), "positions are stretched by stages.0.rope"),
    **dict.fromkeys(("dtype", "torch_dtype"), "precision=bf16 says what weights are kept in"),
    **dict.fromkeys(("model_type", "architectures", "auto_map"), "name another model by model.name"),
    "quantization_config": "name the model in bf16 or fp32 by model.name",
}


def with_changes(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a copy of the config with `changes`; ConfigError for an unknown key or a value of another type."""
    changed = copy.deepcopy(config)
    text: Any = changed.get_text_config()
    for key, value in changes.items():
        if key in _ELSEWHERE:
            raise ConfigError(f"{_WHERE}.{key}: leave it out: {_ELSEWHERE[key]}")
        owner: Any = next((one for one in (text, changed) if key in one.to_dict()), None)
        if owner is None:
            near = difflib.get_close_matches(key, sorted({*text.to_dict(), *changed.to_dict()}), 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else "look for its name in the model's config.json"
            raise ConfigError(f"{_WHERE}: a {config.model_type} has no {key!r}: {hint}")
        setattr(owner, key, _of_type(key, value, getattr(owner, key)))
    return changed


def _of_type(key: str, value: Any, before: Any) -> Any:
    """Return the value, an int as a float if the config holds a float; ConfigError for another type."""
    if isinstance(before, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if before is not None and value is not None and type(value) is not type(before):
        raise ConfigError(f"{_WHERE}.{key}: got {value!r}, and the model has {before!r}: give it a value of that kind")
    return value


def check_shapes(
    before: PreTrainedConfig,
    after: PreTrainedConfig,
    changes: Mapping[str, Any],
    build: Callable[[PreTrainedConfig], PreTrainedModel],
) -> None:
    """Raise ConfigError if `changes` change the shape of a weight; `build` returns a model of a config."""
    with torch.device("meta"):
        shapes = [
            {key: tuple(p.shape) for key, p in build(copy.deepcopy(config)).named_parameters()}
            for config in (before, after)
        ]
    differing = next((key for key in {**shapes[0], **shapes[1]} if shapes[0].get(key) != shapes[1].get(key)), None)
    if differing is not None:
        named = ", ".join(f"{_WHERE}.{key}" for key in changes)
        raise ConfigError(
            f"{named} would change the model's weights ({differing}), and those of its files would not fit: leave it out"
        )
