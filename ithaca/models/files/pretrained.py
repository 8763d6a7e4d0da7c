"""A pretrained model without its weights: config and modules of a folder or hub name, parameters on the meta device.

    config = read_config(folder)            refused here if no model can be built of it
    model = empty_model(config, dtype=...)  no memory, whatever the model's size
    model = add_adapters(model, lora, ...)  if adapters are trained
    parallelize(model, mesh)                shards the empty parameters
    load_weights(model, folder)             each rank reads its part (read_weights.py)

Code from the folder never runs.

Invariant: adapters, and buffers that no file holds (rotary frequencies, masks), have their values, the same on every rank.
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
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, configuration_utils
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ithaca.config.messages import check_folder, near_paths
from ithaca.config.schema import LoraSettings
from ithaca.errors import CheckpointError, ConfigError, UnsupportedError
from ithaca.models.files.config_changes import check_shapes, with_changes
from ithaca.models.refusals.config_numbers import check_computed, check_numbers
from ithaca.planning.model.architectures import verdicts
from ithaca.planning.model.config_check import KnownWords, check_config, read_content
from ithaca.planning.model.known_models import known_config, nearest_models

CONFIG = "config.json"
# Files of a causal language model on the hub to download: no code, no pickles.
_DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def find_folder(name: str, revision: str | None = None, *, typed: str = "model.name") -> Path:
    """Return the local folder of a model: `name` itself, or a download from the hub.

    `typed`: the setting or option with the name, for error messages.
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
        return Path(snapshot_download(name, revision=revision, allow_patterns=_DOWNLOADED))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = re.split(r"\. |\n", str(error).strip())[0][:200]
        near = ", ".join(nearest_models(name))
        raise ConfigError(
            f"{typed} {name!r} is neither a folder here nor found on the hub ({reason}): check the name"
            f"{near and f' (the nearest known are {near})'}, or download the model and name its folder"
            f"{near_paths(folder, CONFIG)}"
        ) from None


def known_model(name: str) -> PreTrainedConfig | None:
    """Return the config of a model in the built-in table, without a folder or a network; None if it is not there."""
    found = known_config(name)
    return None if found is None else AutoConfig.for_model(found.pop("model_type"), **found)


def read_config(folder: str | Path, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return the config of a causal language model's folder; refuse one of which no model can be built.

    `changes`: `model.config` of a run file.
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
        # transformers raises any exception for a wrong value; the last line of its message has the reason.
        reason = reason_of(error)
        kind = content["model_type"]
        raise CheckpointError(f"{file} is no config of a {kind} ({reason}): mend it, or copy the model anew") from error
    config = change_config(config, changes or {})
    check_numbers(config, file)
    # A folder may name an attention whose package is not installed. Ours replaces it, so it need not be.
    config._attn_implementation = None
    # Build it once now, in half a second and without memory, rather than fail after the data are prepared.
    with torch.device("meta"):
        build_causal(copy.deepcopy(config))
    return config


def change_config(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config with `model.config` of a run file; refuse values that a config.json may not have either."""
    if not changes:
        return config
    changed = with_changes(config, changes)
    try:
        check_config(changed.to_dict(), transformers_words())
        check_shapes(config, changed, changes, build_causal)
    except UnsupportedError as error:
        raise ConfigError(f"model.config: {error}") from None
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith("model.config") else f"model.config: {message}") from None
    return changed


@cache
def transformers_words() -> KnownWords:
    """Return the names that the installed transformers knows; a plan, without transformers, has a table of its own."""
    # A private name, which older versions do not have; checked on 5.23. Without it, old names of layer types are refused.
    older = getattr(configuration_utils, "_LEGACY_LAYER_TYPE_REMAP", {})
    return KnownWords(
        causal=frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        activations=frozenset(ACT2FN),
        ropes=frozenset({*ROPE_INIT_FUNCTIONS, "default"}),
        layers=frozenset({*configuration_utils.ALLOWED_LAYER_TYPES, *older}),
    )


def build_causal(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a model of `config` on the current default device; refuse a config that transformers cannot build.

    `options`: transformers' own (`dtype`). Every model of a user's config is built here.
    """
    try:
        model: PreTrainedModel
        if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or config.model_type not in verdicts():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        else:
            # transformers' own table of causal language models lacks some text parts of multimodal models.
            model = getattr(transformers, verdicts()[config.model_type]["classes"])._from_config(config, **options)
    except Exception as error:
        # A model's code raises any exception for a wrong value, such as torch's assertion on padding_idx.
        raise UnsupportedError(
            f"{config.model_type}: no model can be built of this config ({reason_of(error)}): mend its {CONFIG}"
        ) from error
    return model


def reason_of(error: Exception) -> str:
    """Return the error's type and the last line of its message, if it has one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__


def empty_model(source: str | Path | PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder or config in training mode, its parameters on the meta device."""
    config = source if isinstance(source, PreTrainedConfig) else read_config(source)
    with torch.device("meta"):
        model = build_causal(config, dtype=dtype)
    fill_buffers(model)
    check_computed(model)
    return model.train()


def fill_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file holds, by transformers' own initialization; weights stay on meta."""
    for key, buffer in list(model.named_non_persistent_buffers()):
        where, _, name = key.rpartition(".")
        model.get_submodule(where)._buffers[name] = torch.empty_like(buffer, device="cpu")
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    # Initializing a weight on the meta device costs nothing. `_is_hf_initialized` would skip it (checked on 5.23).
    model.initialize_weights()


def check_adapters(config: PreTrainedConfig, lora: LoraSettings) -> None:
    """Refuse `lora.targets` that get no adapter; on the meta device, so it costs no memory."""
    with torch.device("meta"):
        _put_adapters(build_causal(copy.deepcopy(config)), lora)


def add_adapters(model: PreTrainedModel, lora: LoraSettings, *, seed: int) -> nn.Module:
    """Put LoRA adapters on a model before `parallelize`, drawn from `seed` alone, and freeze everything else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted, layers = _put_adapters(model, lora)
        for layer in layers.values():
            _fill_adapter(layer)
    return adapted


def _put_adapters(model: PreTrainedModel, lora: LoraSettings) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model with adapters, and the layers that have one, by name."""
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


def _check_names(layers: dict[str, nn.Module], lora: LoraSettings) -> None:
    """Refuse a target that no layer is named after: peft ignores it if another target is found."""
    if isinstance(lora.targets, str):
        return
    names = sorted({name.rpartition(".")[2] for name, layer in layers.items() if isinstance(layer, nn.Linear | Conv1D)})
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            near = difflib.get_close_matches(target, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"lora.targets: no layer of this model is called {target!r}: {hint}")


def _check_targets(model: PreTrainedModel, layers: dict[str, Any], lora: LoraSettings) -> None:
    """Refuse an adapter that training would bypass, or that export would not merge."""
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
    """Allocate and draw an adapter: peft put it on the meta device, beside its weight."""
    for name in ("lora_A", "lora_B"):
        getattr(layer, name)["default"].to_empty(device="cpu")
    layer.reset_lora_parameters("default", True)
