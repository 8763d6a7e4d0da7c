"""A pretrained model without its weights: config and modules from a folder or a hub name, parameters on the meta device.

`empty_model` costs no memory whatever the model's size; `parallelize` shards what is empty and
`state.load.load_weights` fills each rank's part. Code from the folder is never run.

Invariant: buffers that no file holds (rotary frequencies, masks) are real and what transformers would have computed,
and so are adapters, alike on every rank.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, configuration_utils
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ithaca.config.messages import check_folder, near_paths
from ithaca.config.schema import Lora
from ithaca.errors import CheckpointError, ConfigError, UnsupportedError
from ithaca.models.files.config_changes import check_shapes, lay_over
from ithaca.models.refusals.config_numbers import check_computed, check_numbers
from ithaca.planning.model.config_check import KnownWords, check_config, read_content
from ithaca.planning.model.known_models import known_config, nearest_models

CONFIG = "config.json"
# What a causal language model is made of on the hub: no code, no pickles.
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def find_folder(name: str, revision: str | None = None, *, typed: str = "model.name") -> Path:
    """The local folder of a model: `name` itself if it is one, else the hub's files, fetched once.

    `typed`: where the user gave the name, for what is said of it.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision:
            raise ConfigError(f"model.revision is for a name on the hub, and {name!r} is a folder here: leave it out")
        return folder
    check_folder(name, typed)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_WANTED))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = re.split(r"\. |\n", str(error).strip())[0][:200]
        near = ", ".join(nearest_models(name))
        raise ConfigError(
            f"{typed} {name!r} is neither a folder here nor found on the hub ({reason}): check the name"
            f"{near and f' (the nearest known are {near})'}, or download the model and name its folder"
            f"{near_paths(folder, CONFIG)}"
        ) from None


def known_model(name: str) -> PreTrainedConfig | None:
    """The config of a model that the built-in table has under this name, without a folder or a network."""
    found = known_config(name)
    return None if found is None else AutoConfig.for_model(found.pop("model_type"), **found)


def read_config(folder: str | Path, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The config of a causal language model's folder; one that no model can be built with is refused, by the value.

    `changes`: a run's own values, `model.config` of its file.
    """
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}: it is no Hugging Face model; name a folder that has one")
    try:
        content = read_content(file)
        check_config(content, transformers_words())
    except UnsupportedError as error:
        raise UnsupportedError(f"{file}: {error}") from None
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}: mend it, or copy the model anew") from None
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        # transformers raises whatever a class makes of a wrong value, and says what is wrong in the last line of several.
        reason = reason_of(error)
        kind = content["model_type"]
        raise CheckpointError(f"{file} is no config of a {kind} ({reason}): mend it, or copy the model anew") from error
    config = change_config(config, changes or {})
    check_numbers(config, file)
    # A folder may name an attention whose package is not here. Ours takes its place, so none has to be.
    config._attn_implementation = None
    # Half a second for the largest models, and no memory: better than after the data are prepared.
    with torch.device("meta"):
        build_causal(copy.deepcopy(config))
    return config


def change_config(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """The config with a run's own values; what they may not be is refused as it is in a config.json."""
    if not changes:
        return config
    changed = lay_over(config, changes)
    try:
        check_config(changed.to_dict(), transformers_words())
        check_shapes(config, changed, changes, build_causal)
    except UnsupportedError as error:
        raise ConfigError(f"model.config: {error}") from None
    except ConfigError as error:
        said = str(error)
        raise ConfigError(said if said.startswith("model.config") else f"model.config: {said}") from None
    return changed


@cache
def transformers_words() -> KnownWords:
    """The names that the transformers installed here knows; a plan goes by `planning.config_words` instead."""
    # No public name, and older versions have none; checked on 5.23.
    older = getattr(configuration_utils, "_LEGACY_LAYER_TYPE_REMAP", {})
    return KnownWords(
        causal=frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        activations=frozenset(ACT2FN),
        ropes=frozenset({*ROPE_INIT_FUNCTIONS, "default"}),
        layers=frozenset({*configuration_utils.ALLOWED_LAYER_TYPES, *older}),
    )


def build_causal(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A model of `config`, on the current default device; a config that transformers cannot build from is refused.

    `options`: transformers' own (`dtype`). Nobody else in the library builds a user's model from a config.
    """
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    except Exception as error:
        # A model's code raises whatever a wrong value makes it do, down to torch's assertion on the padding's number.
        raise UnsupportedError(
            f"{config.model_type}: no model can be built of this config ({reason_of(error)}): mend its {CONFIG}"
        ) from error
    return model


def reason_of(error: Exception) -> str:
    """The last line of what a library says, with the kind of error where that is all there is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__


def empty_model(source: str | Path | PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder or config, in training mode, its parameters on the meta device."""
    config = source if isinstance(source, PreTrainedConfig) else read_config(source)
    with torch.device("meta"):
        model = build_causal(config, dtype=dtype)
    fill_buffers(model)
    check_computed(model)
    return model.train()


def fill_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file holds, by transformers' own initialisation; weights on meta stay empty."""
    for key, buffer in list(model.named_non_persistent_buffers()):
        where, _, name = key.rpartition(".")
        model.get_submodule(where)._buffers[name] = torch.empty_like(buffer, device="cpu")
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    # On the meta device initialising a weight does nothing and costs nothing.
    model.initialize_weights()


def check_adapters(config: PreTrainedConfig, lora: Lora) -> None:
    """Refuse targets that get no adapter here; on the meta device, so it costs no memory."""
    with torch.device("meta"):
        _put_adapters(build_causal(copy.deepcopy(config)), lora)


def add_adapters(model: PreTrainedModel, lora: Lora, *, seed: int) -> nn.Module:
    """Put LoRA adapters on a model, before `parallelize`; the rest of it is frozen. A function of `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted, layers = _put_adapters(model, lora)
        for layer in layers.values():
            _fill_adapter(layer)
    return adapted


def _put_adapters(model: PreTrainedModel, lora: Lora) -> tuple[nn.Module, dict[str, Any]]:
    """The model with adapters, and the layers that have one by name."""
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise UnsupportedError(f"lora needs peft ({error}): pip install 'ithaca[peft]', or leave lora out") from error

    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        task_type="CAUSAL_LM",
    )
    layers_before = dict(model.named_modules())
    try:
        adapted: Any = get_peft_model(model, settings)
    except ValueError as error:
        _check_names(layers_before, lora)
        raise ConfigError(f"lora.targets {lora.targets!r}: {error}") from None
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    _check_targets(model, layers, lora)
    _check_names(layers_before, lora)
    return adapted, layers


def _check_names(layers: dict[str, nn.Module], lora: Lora) -> None:
    """Refuse a target that no layer is called: beside one that is there peft passes it by without a word."""
    if isinstance(lora.targets, str):
        return
    there = sorted({name.rpartition(".")[2] for name, layer in layers.items() if isinstance(layer, nn.Linear | Conv1D)})
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            near = difflib.get_close_matches(target, there, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(there)}"
            raise ConfigError(f"lora.targets: no layer of this model is called {target!r}: {hint}")


def _check_targets(model: PreTrainedModel, layers: dict[str, Any], lora: Lora) -> None:
    """Refuse an adapter that would be passed by in training, or not be merged on export."""
    from peft.tuners.lora import Linear

    head = model.get_output_embeddings()
    right = {name for name, layer in layers.items() if isinstance(layer, Linear) and layer is not head}
    for name, layer in layers.items():
        if name in right:
            continue
        kind = type(layer.get_base_layer()).__name__
        reason = "the head, whose weight the loss reads by itself," if layer is head else f"no linear layer ({kind})"
        named = ",".join(sorted({name.rpartition(".")[2] for name in right}))
        raise UnsupportedError(
            f"lora.targets {lora.targets!r}: {name} is {reason} and gets no adapter: use "
            f"lora.targets={f'[{named}]' if named else 'all-linear'}"
        )


def _fill_adapter(layer: Any) -> None:
    """Adapters follow their weight to the meta device, which takes their values: draw them anew."""
    for name in ("lora_A", "lora_B"):
        getattr(layer, name)["default"].to_empty(device="cpu")
    layer.reset_lora_parameters("default", True)
