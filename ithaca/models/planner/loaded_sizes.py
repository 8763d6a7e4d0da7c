"""Sizes of a loaded model for `planning/`: parameters are counted on its modules rather than derived from its config.

    loaded_sizes(ModelParts.of(model))    ModelSizes(layers=(LayerSizes(attention=..., mlp=...), ...), adapters=...)

Widths and heads still come from the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from ithaca.models.support import ModelParts
from ithaca.planning.model.layer_parameters import InputsNeeded
from ithaca.planning.model.model_sizes import ModelSizes

# Splits a parameter's name after the path of its linear layer: PEFT adds names between the path and the weight.
_LINEAR_PATH = re.compile(r"\.(?:base_layer|lora_\w+|modules_to_save|original_module|weight)\b")
_ADAPTER = re.compile(r"\b(?:lora_\w+|modules_to_save)\.")


def loaded_sizes(parts: ModelParts) -> ModelSizes:
    """Return the model's sizes; if most of its layers' weights are frozen, the trained weights count as adapters."""
    sizes = ModelSizes.from_config(_common_config(parts))
    total, counts = _own_parameters(parts.base), [_own_parameters(layer) for layer in parts.layers]
    if len(counts) != len(sizes.layers):
        counts = [(total - sizes.root) // len(sizes.layers)] * len(sizes.layers)
    layers = tuple(
        replace(layer, attention=min(layer.attention, count), mlp=max(0, count - layer.attention), norms=0)
        for layer, count in zip(sizes.layers, counts, strict=True)
    )
    if any(_norms_heads(layer) for layer in parts.layers):
        heads = (sizes.heads + sizes.kv_heads) * sizes.key_size
        layers = tuple(replace(layer, normed=layer.normed or heads) for layer in layers)
    beside = total - sum(layer.parameters for layer in layers)
    sizes = replace(sizes, layers=layers, final_norm=max(0, beside - sizes.embedding - sizes.head))
    in_layers = sum(_trained(layer.named_parameters()) for layer in parts.layers)
    return sizes if 2 * in_layers >= sizes.layer_parameters else _mostly_frozen(sizes, parts, in_layers)


def _mostly_frozen(sizes: ModelSizes, parts: ModelParts, in_layers: int) -> ModelSizes:
    """Return the sizes with everything trained as adapters; `in_layers`: trained parameters inside the layers."""
    layers = sizes.layers
    if len(parts.layers) == len(layers):
        layers = tuple(
            replace(layer, adapted=_adapter_inputs(module), inputs_needed=_inputs_needed(module))
            for layer, module in zip(layers, parts.layers, strict=True)
        )
    trained, head = _trained(parts.model.named_parameters()), parts.base.get_output_embeddings()
    head_is_trained = isinstance(head, nn.Module) and any(
        p.requires_grad and p.numel() >= sizes.embedding for p in head.parameters()
    )
    return replace(
        sizes,
        layers=layers,
        adapters=trained,
        beside=trained - in_layers,
        in_place=trained - _trained((n, p) for n, p in parts.model.named_parameters() if _ADAPTER.search(n)),
        trained_head=sizes.embedding if head_is_trained else 0,
    )


def _own_parameters(module: nn.Module) -> int:
    """Return the number of parameters, without those of adapters."""
    return sum(p.numel() for name, p in module.named_parameters() if not _ADAPTER.search(name))


def _trained(parameters: Iterable[tuple[str, nn.Parameter]]) -> int:
    return sum(p.numel() for _, p in parameters if p.requires_grad)


def _norms_heads(layer: nn.Module) -> bool:
    """True if queries and keys are normed, which no config value shows."""
    return any(
        "norm" in own and "att" in path for path, _, own in (n.rpartition(".") for n, _ in layer.named_modules())
    )


def _adapter_inputs(layer: nn.Module) -> tuple[int, int]:
    """Return the summed input widths of the LoRA adapters in the layer's attention, and in the rest of the layer."""
    attention = rest = 0
    for name, module in layer.named_modules():
        if hasattr(module, "lora_A"):
            size = int(module.in_features)
            attention, rest = (attention + size, rest) if "att" in name else (attention, rest + size)
    return attention, rest


def _inputs_needed(layer: nn.Module) -> InputsNeeded:
    """Return the linear layers whose weight (or adapter) is trained; attention and MLP each end with their output layer."""
    linears: dict[str, bool] = {}
    for name, parameter in layer.named_parameters():
        if parameter.ndim > 1:
            owner = _LINEAR_PATH.split(name)[0]
            linears[owner] = linears.get(owner, False) or parameter.requires_grad
    attention, rest = ([on for name, on in linears.items() if ("att" in name) is within] for within in (True, False))
    return InputsNeeded(*_any_trained(attention), *_any_trained(rest))


def _any_trained(linears: list[bool]) -> tuple[bool, bool]:
    """Return two bools: any linear layer but the last is trained, and the last is trained; True if there is none."""
    return any(linears[:-1] or linears or [True]), any(linears[-1:] or [True])


def _common_config(parts: ModelParts) -> dict[str, Any]:
    """Return the config under the names that most architectures use; the config class maps other names to them."""
    config: Any = parts.base.config.get_text_config()
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    named = {key: getattr(config, key, None) for key in usual}
    # Counted on the model: hrm_text's config counts a layer once for every run in a pass.
    named["num_hidden_layers"] = len(parts.layers) or named["num_hidden_layers"]
    named["intermediate_size"] = (
        named["intermediate_size"] or getattr(config, "n_inner", None) or 4 * int(config.hidden_size)
    )
    return {**config.to_dict(), **named}
