"""A model's sizes counted from its modules, for a plan of an architecture whose config does not say them by usual names.

The modules are built without weights, on the meta device: parameters of every layer, and inputs and outputs of every
linear map, are those of the architecture's own code. Widths, heads and windows are its config class's, defaults filled in.
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
from ithaca.models.planner.loaded_sizes import sizes_of
from ithaca.models.support import decoder_layers
from ithaca.planning.model.architectures import verdicts
from ithaca.planning.model.model_sizes import ModelSizes


def counted_sizes(name: str, config: Mapping[str, Any]) -> ModelSizes | None:
    """Sizes of the model (of the text model, where a config has several parts) that the content of a config.json
    describes; None where transformers has no causal language model of its type."""
    kind = _causal(str(config.get("model_type", "")))
    inner = config.get("text_config")
    if kind is None and isinstance(inner, Mapping):
        config = inner
        kind = _causal(str(inner.get("model_type", "")))
    if kind is None:
        return None
    try:
        model = _empty(kind, config)
    except Exception as error:
        # Config classes and modules check what they read in their own ways; whatever they raise is the config's fault.
        reason = str(error).strip().splitlines()[-1:] or [""]
        raise ConfigError(
            f"{name}: transformers builds no {kind} of this config ({type(error).__name__}: {reason[0].strip()}): its own "
            "config.json is needed"
        ) from error
    sizes, layers = sizes_of(model, model), decoder_layers(model)
    if len(layers) != len(sizes.layers):
        return sizes
    edges = [_linear_edges(layer) for layer in layers]
    counted = (replace(layer, linear_edges=count) for layer, count in zip(sizes.layers, edges, strict=True))
    return replace(sizes, layers=tuple(counted))


def _causal(kind: str) -> str | None:
    """The type, if a causal language model can be built of it: by its own name, or as the text part of another."""
    row = verdicts().get(kind)
    known = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (row is not None and row["verdict"] == "exact")
    return kind if known and kind in CONFIG_MAPPING else None


def _empty(kind: str, config: Mapping[str, Any]) -> PreTrainedModel:
    cls: Any = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) or verdicts()[kind]["classes"])
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = CONFIG_MAPPING[kind].from_dict(dict(config))
        # What only takes text is built of the part of the config that is about text.
        own = read if isinstance(read, cls.config_class) else read.get_text_config()
        own._attn_implementation = "eager"
        model: PreTrainedModel = cls(own)
    return model


def _linear_edges(layer: nn.Module) -> int:
    return sum(m.in_features + m.out_features for m in layer.modules() if isinstance(m, nn.Linear))
