"""The sizes of a model at hand, as `planning/` wants them: its parameters counted rather than worked out from its config."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ithaca.models.support import decoder_layers
from ithaca.planning.model.layer_parameters import Wants
from ithaca.planning.model.model_sizes import ModelSizes

# Where the name of a parameter leaves that of the linear map it belongs to, its adapters and copies included.
_OF_A_MAP = re.compile(r"\.(?:base_layer|lora_\w+|modules_to_save|original_module|weight)\b")
_ADDED = re.compile(r"\b(?:lora_\w+|modules_to_save)\.")


def sizes_of(model: nn.Module, base: PreTrainedModel) -> ModelSizes:
    """The model's sizes. Where most of its layers' weights are frozen, what is trained counts as adapters do."""
    sizes, decoders = ModelSizes.from_config(_described(base)), decoder_layers(base)
    total, counts = _own(base), [_own(layer) for layer in decoders]
    if len(counts) != len(sizes.layers):
        counts = [(total - sizes.root) // len(sizes.layers)] * len(sizes.layers)
    layers = tuple(
        replace(layer, attention=min(layer.attention, count), mlp=max(0, count - layer.attention), norms=0)
        for layer, count in zip(sizes.layers, counts, strict=True)
    )
    if any(_norms_heads(layer) for layer in decoders):
        heads = (sizes.heads + sizes.kv_heads) * sizes.key_size
        layers = tuple(replace(layer, normed=layer.normed or heads) for layer in layers)
    beside = total - sum(layer.parameters for layer in layers)
    sizes = replace(sizes, layers=layers, final_norm=max(0, beside - sizes.embedding - sizes.head))
    in_layers = sum(_trained(layer.named_parameters()) for layer in decoders)
    return sizes if 2 * in_layers >= sizes.layer_parameters else _mostly_frozen(sizes, model, base, in_layers)


def _mostly_frozen(sizes: ModelSizes, model: nn.Module, base: PreTrainedModel, in_layers: int) -> ModelSizes:
    decoders, layers = decoder_layers(base), sizes.layers
    if len(decoders) == len(layers):
        layers = tuple(
            replace(layer, adapted=_adapted(own), wants=_wants(own))
            for layer, own in zip(layers, decoders, strict=True)
        )
    trained, head = _trained(model.named_parameters()), base.get_output_embeddings()
    whole = isinstance(head, nn.Module) and any(
        p.requires_grad and p.numel() >= sizes.embedding for p in head.parameters()
    )
    return replace(
        sizes,
        layers=layers,
        adapters=trained,
        beside=trained - in_layers,
        in_place=trained - _trained((n, p) for n, p in model.named_parameters() if _ADDED.search(n)),
        trained_head=sizes.embedding if whole else 0,
    )


def _own(module: nn.Module) -> int:
    """Parameters without those that adapters add."""
    return sum(p.numel() for name, p in module.named_parameters() if not _ADDED.search(name))


def _trained(parameters: Iterable[tuple[str, nn.Parameter]]) -> int:
    return sum(p.numel() for _, p in parameters if p.requires_grad)


def _norms_heads(layer: nn.Module) -> bool:
    """Whether queries and keys are normed: a config does not say."""
    return any(
        "norm" in own and "att" in path for path, _, own in (n.rpartition(".") for n, _ in layer.named_modules())
    )


def _adapted(layer: nn.Module) -> tuple[int, int]:
    """A token's values that go into the adapters of a layer's attention and of the rest of it."""
    attention = rest = 0
    for name, module in layer.named_modules():
        if hasattr(module, "lora_A"):
            size = int(module.in_features)
            attention, rest = (attention + size, rest) if "att" in name else (attention, rest + size)
    return attention, rest


def _wants(layer: nn.Module) -> Wants:
    """Attention and MLP each end with the map that gives back to the residual stream."""
    maps: dict[str, bool] = {}
    for name, parameter in layer.named_parameters():
        if parameter.ndim > 1:
            owner = _OF_A_MAP.split(name)[0]
            maps[owner] = maps.get(owner, False) or parameter.requires_grad
    attention, rest = ([on for name, on in maps.items() if ("att" in name) is within] for within in (True, False))
    return Wants(*_ends(attention), *_ends(rest))


def _ends(trained: list[bool]) -> tuple[bool, bool]:
    """Of maps in their order: whether any but the last is trained, and the last. What is not found counts."""
    return any(trained[:-1] or trained or [True]), any(trained[-1:] or [True])


def _described(base: PreTrainedModel) -> dict[str, Any]:
    """The config under the names that most architectures use; its class knows the others."""
    config: Any = base.config.get_text_config()
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    named = {key: getattr(config, key, None) for key in usual}
    # Found rather than said: a config may count a layer as often as it runs in a pass (hrm_text).
    named["num_hidden_layers"] = len(decoder_layers(base)) or named["num_hidden_layers"]
    named["intermediate_size"] = (
        named["intermediate_size"] or getattr(config, "n_inner", None) or 4 * int(config.hidden_size)
    )
    return {**config.to_dict(), **named}
