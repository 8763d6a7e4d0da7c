"""Facts about types that are measured on a small model, or read from the defaults of the type's config class.

    measured("gemma2")   {"tied": True, "sandwiched": True, "norm_after_mlp": True, "norms_in_fp32": True, ...}

A model of small sizes is built as the config's defaults have it. Its parts are found by what they are: a norm is a child
with weights of one dimension alone, the MLP is a wide unit. Norms run on bf16, and the dtype of the product with
their weight is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ithaca.models.support import decoder_layers
from ithaca.verify.small_models.types import survey_config

POSITIONS = 128


def measured(kind: str) -> dict[str, Any]:
    """Return every measured fact about a type."""
    model = AutoModelForCausalLM.from_config(survey_config(kind))
    layers = decoder_layers(model)
    return from_defaults(AutoConfig.for_model(kind)) | from_modules(model, layers[-1])


def from_defaults(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the facts that stand in the defaults of a config class."""
    types = getattr(config, "layer_types", None) or []
    full = [index for index, name in enumerate(types) if name == "full_attention"]
    period = full[1] - full[0] if len(full) > 1 else 0
    slides = "sliding_attention" in types
    return {
        "tied": bool(config.tie_word_embeddings),
        "full_first": period if slides and full[0] == 0 else 0,
        "full_last": period if slides and full[0] == period - 1 else 0,
        "slides_if_set": hasattr(config, "use_sliding_window"),
    }


def from_modules(model: PreTrainedModel, layer: nn.Module) -> dict[str, Any]:
    """Return the facts that a layer's weights show."""
    inner = {id(each) for each in layer.modules()}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and id(m) not in inner]
    children = dict(layer.named_children())
    norms = {name: child for name, child in children.items() if _is_norm(child)}
    names = {name for name, _ in layer.named_parameters()}
    biases = {name for name in names if name.endswith("bias")}
    norm = next(iter(norms.values()), None)
    fp32, centred = (False, False) if norm is None else _norm_arithmetic(norm)
    return {
        "learned_positions": any(m.num_embeddings == POSITIONS for m in tables),
        "sinks": any(name.endswith("sinks") for name in names),
        "norm_biases": any(name.partition(".")[0] in norms for name in biases),
        "norms": len(norms),
        "norms_in_fp32": fp32,
        "centred": centred,
        "biases": sorted(biases), "names": sorted(names-biases),
    }


def _is_norm(module: nn.Module) -> bool:
    weights = list(module.parameters())
    return bool(weights) and all(weight.dim() == 1 for weight in weights) or "norm" in type(module).__name__.lower()


class _Arithmetic(TorchFunctionMode):
    """Record dtypes of products with a norm's weight, and differences from a mean."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.made, self.fp32, self.centred, self.means = [weight], [], False, False, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        of_weight = any(each is held for each in args for held in self.weight)
        if name in ("float", "to", "add", "__radd__", "__add__") and of_weight and isinstance(result, Tensor):
            self.weight.append(result)
        if "mul" in name and of_weight:
            self.fp32 = result.dtype == torch.float32
        if name == "mean":
            self.means.append(result)
        if name in ("sub", "__sub__", "rsub") and any(each is mean for each in args for mean in self.means):
            self.centred = True
        return result


def _norm_arithmetic(norm: nn.Module) -> tuple[bool, bool]:
    norm = norm.to(torch.bfloat16)
    weight = next(norm.parameters(), None)
    if weight is None:
        return False, False
    with torch.no_grad(), _Arithmetic(weight) as seen:
        norm(torch.randn(1, 2, len(weight), dtype=torch.bfloat16))
    return seen.fp32, seen.centred
