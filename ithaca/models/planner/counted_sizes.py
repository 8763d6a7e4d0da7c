"""Sizes of an architecture whose config does not use the common names, counted on modules built without weights.

    counted_sizes("bigcode/starcoder", config)    builds the model on the meta device: seconds, no memory

Parameters of every layer, and inputs and outputs of every linear layer, are those of the architecture's own code. Widths,
heads and windows come from its config class, which fills in defaults.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ithaca.errors import ConfigError
from ithaca.models.planner.loaded_sizes import loaded_sizes
from ithaca.models.support import ModelParts
from ithaca.planning.model.architectures import verdicts
from ithaca.planning.model.model_sizes import ModelSizes


def counted_sizes(name: str, config: Mapping[str, Any]) -> ModelSizes | None:
    """Return the sizes of the model (or of its text model) that a config.json's content describes.

    None if transformers has no causal language model of the type.
    """
    kind = _causal(str(config.get("model_type", "")))
    inner = config.get("text_config")
    if kind is None and isinstance(inner, Mapping):
        config = inner
        kind = _causal(str(inner.get("model_type", "")))
    if kind is None:
        return None
    try:
        model = _meta_model(kind, config)
    except Exception as error:
        # Config classes and modules raise exceptions of any kind for values they cannot use.
        reason = str(error).strip().splitlines()[-1:] or [""]
        raise ConfigError(
            f"{name}: transformers builds no {kind} of this config ({type(error).__name__}: {reason[0].strip()}): its own "
            "config.json is needed"
        ) from error
    parts = ModelParts.of(model)
    sizes = loaded_sizes(parts)
    if len(parts.layers) != len(sizes.layers):
        return sizes
    linears = ([m for m in layer.modules() if isinstance(m, nn.Linear)] for layer in parts.layers)
    edges = [sum(m.in_features + m.out_features for m in own) for own in linears]
    counted = (replace(layer, linear_edges=count) for layer, count in zip(sizes.layers, edges, strict=True))
    return replace(sizes, layers=tuple(counted))


def _causal(kind: str) -> str | None:
    """Return the type if transformers has a causal language model of this name, else None."""
    row = verdicts().get(kind)
    known = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (row is not None and row["verdict"] == "exact")
    return kind if known and kind in CONFIG_MAPPING else None


def _meta_model(kind: str, config: Mapping[str, Any]) -> PreTrainedModel:
    """Return the model on the meta device."""
    cls: Any = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) or verdicts()[kind]["classes"])
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = CONFIG_MAPPING[kind].from_dict(dict(config))
        # A text-only class takes the text part of a multimodal config.
        own = read if isinstance(read, cls.config_class) else read.get_text_config()
        own._attn_implementation = "eager"
        model: PreTrainedModel = cls(own)
    return model
