"""Export of a checkpoint as a Hugging Face folder: config, generation config, tokenizer files, safetensors.

One process without GPUs is enough: weights are read and written a layer at a time, and the folder is what transformers'
own `save_pretrained` of the whole model would write. A model with adapters is exported twice: the adapter alone in
`adapter/`, and the whole model with the adapter merged in.

A checkpoint holds tensors alone; `describe_model` returns the rest, which is kept in the checkpoint's facts under "model".
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.config.messages import near_paths
from ithaca.errors import CheckpointError
from ithaca.models.files.conversion import describe_conversions, restore_conversions
from ithaca.models.files.export_folder import description_of
from ithaca.models.files.model_origin import ORIGIN, check_base
from ithaca.models.files.read_weights import WholeWeights, base_of, plain_name
from ithaca.models.files.safetensors_files import modes_of_umask
from ithaca.models.files.write_weights import write_model
from ithaca.state.checkpoint import manifest
from ithaca.state.checkpoint.dcp import CheckpointTensors
from ithaca.state.weights.finite import check_finite

logger = logging.getLogger("ithaca")
DESCRIPTION = "model"
ADAPTER = "adapter"
_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
    "*.model", "*.tiktoken",
)  # fmt: skip


def describe_model(model: nn.Module, *, folder: str | Path, tokenizer: str | Path | None = None) -> dict[str, Any]:
    """Return the part of a model that is no tensor as JSON: configs, adapter settings, names of its sources.

    `folder`: the source of the weights, which an export of adapters reads again. `tokenizer`: the folder of its files or a
    hub name, the same folder if None.
    """
    base = base_of(model)
    tokenizer = tokenizer or folder
    adapted: Any = model if hasattr(model, "peft_config") else None
    return {
        "conversions": describe_conversions(base),
        "config": json.loads(base.config.to_json_string()),
        "generation": json.loads(base.generation_config.to_json_string()) if base.can_generate() else None,
        "adapter": None if adapted is None else _as_json(adapted.peft_config["default"].to_dict()),
        "folder": str(Path(folder).resolve()),
        "tokenizer": str(Path(tokenizer).resolve() if Path(tokenizer).is_dir() else tokenizer),
    }


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Return peft's settings with lists for sets and values for enums."""
    return {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in settings.items()
    }


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Return a complete checkpoint: `path` itself, or one of the run `path`, the newest if `step` is None."""
    if (path / manifest.MANIFEST).is_file():
        if step not in (None, manifest.step_of(path)):
            raise CheckpointError(f"{path} is one checkpoint, not that of step {step}: name the run's folder instead")
        found = [path]
    else:
        found = manifest.listed(path / "checkpoints") or manifest.listed(path)
    if not found:
        what = "holds no checkpoint" if path.is_dir() else "is no folder"
        near = "" if path.is_dir() else near_paths(path)
        raise CheckpointError(f"{path} {what}: name a run's folder, or a checkpoint such as step-00000200{near}")
    chosen = [each for each in found if step in (None, manifest.step_of(each))]
    if not chosen:
        there = ", ".join(str(manifest.step_of(each)) for each in reversed(found))
        raise CheckpointError(f"{path} has no checkpoint of step {step}: there are {there}")
    problems: list[str] = []
    for each in chosen:
        problem = manifest.problem_of(each)
        if problem is None:
            for skipped in problems:
                logger.warning("%s: %s is taken instead", skipped, each)
            return each
        problems.append(problem)
    if len(chosen) == 1:
        raise CheckpointError(problems[0])
    raise CheckpointError(f"{path}: none of its {len(chosen)} checkpoints is whole ({'; '.join(problems[:3])})")


def export_checkpoint(
    checkpoint: Path, to: Path, *, dtype: torch.dtype | None = None, max_shard_size: str | int = "50GB"
) -> None:
    """Write `checkpoint` to the folder `to`; `dtype`: type of the weights, None for the checkpoint's own.

    Weights that are not finite are refused by name.
    """
    description = description_of(checkpoint, DESCRIPTION)
    saved = CheckpointTensors(checkpoint)
    if description["adapter"] is None:
        _write_whole(description, saved, to, dtype, max_shard_size)
    else:
        if Path(description["folder"]).is_dir():
            check_base(manifest.read_facts(checkpoint).get(ORIGIN), Path(description["folder"]))
        _write_merged(description, saved, to, dtype, max_shard_size)
    copy_tokenizer(description["tokenizer"], to)


def copy_tokenizer(source: str, to: Path) -> None:
    """Copy a tokenizer's files from a folder, or save the tokenizer of a hub name."""
    if Path(source).is_dir():
        for file in {file for pattern in _TOKENIZER for file in Path(source).glob(pattern) if file.is_file()}:
            shutil.copyfile(file, to / file.name)
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(to)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        logger.warning("%s has no tokenizer: %r cannot be found (%s); copy its files there", to, source, reason)


def _twin(description: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return the model that was trained on the meta device, with the config it had then."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    settings = dict(description["config"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        twin: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if description["generation"] is not None:
        twin.generation_config = GenerationConfig.from_dict(description["generation"])
    restore_conversions(twin, description["conversions"])
    twin.name_or_path = description["folder"]
    return twin


def _write_whole(
    description: dict[str, Any],
    saved: CheckpointTensors,
    to: Path,
    dtype: torch.dtype | None,
    max_shard_size: str | int,
) -> None:
    kept = {key.removeprefix("model."): meta for key, meta in saved.tensors.items() if key.startswith("model.")}
    width = next(meta.properties.dtype for meta in kept.values() if meta.properties.dtype.is_floating_point)
    twin = _twin(description, dtype or width)
    names = _kept_names(twin, set(kept))

    def fetch(key: str, empty: Tensor) -> Tensor:
        return check_finite(saved.whole(f"model.{names[key]}").to(empty.dtype), key, "the checkpoint")

    write_model(twin, to, fetch, max_shard_size=max_shard_size, alone=True)


def _kept_names(twin: Any, kept: set[str]) -> dict[str, str]:
    """Return each weight's name in the checkpoint: its own, or that of the weight it is tied to."""
    tied: dict[str, str] = dict(twin.all_tied_weights_keys)
    names = {}
    for key in twin.state_dict():
        tied_names = [key, tied.get(key, key), *(other for other, source in tied.items() if source == key)]
        found = next((name for name in tied_names if name in kept), None)
        if found is None:
            raise CheckpointError(f"the checkpoint does not hold {key}: its config is of another model")
        names[key] = found
    return names


def _write_merged(
    description: dict[str, Any],
    saved: CheckpointTensors,
    to: Path,
    dtype: torch.dtype | None,
    max_shard_size: str | int,
) -> None:
    folder = Path(description["folder"])
    if not folder.is_dir():
        raise CheckpointError(f"{folder}, which the adapter was trained on, is gone: put the model back there")
    trained = next(iter(saved.tensors.values())).properties.dtype
    twin = _twin(description, dtype or trained)
    weights = WholeWeights(twin, folder)
    adapted, merge = _adapted(description, saved, trained)

    def fetch(key: str, empty: Tensor) -> Tensor:
        return check_finite(merge(key, weights.whole(key).to(trained)).to(empty.dtype), key, "the merged model")

    write_model(twin, to, fetch, max_shard_size=max_shard_size, alone=True)
    with modes_of_umask(to / ADAPTER):
        adapted.save_pretrained(to / ADAPTER)


def _adapted(
    description: dict[str, Any], saved: CheckpointTensors, dtype: torch.dtype
) -> tuple[Any, Callable[[str, Tensor], Tensor]]:
    """Return a meta model with the checkpoint's adapter, and a function that merges the adapter into a weight."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    # peft warns if the adapter and its base model name the folder differently.
    settings = LoraConfig(**description["adapter"] | {"base_model_name_or_path": description["folder"]})
    adapted: Any = get_peft_model(_twin(description, dtype), settings)
    for name, parameter in list(adapted.named_parameters()):
        if f"model.{name}" in saved.tensors:
            where, _, last = name.rpartition(".")
            real = nn.Parameter(saved.whole(f"model.{name}"), requires_grad=parameter.requires_grad)
            adapted.get_submodule(where)._parameters[last] = real
    base = adapted.get_base_model()
    layers = {f"{name}.weight": layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    # `add_adapters` refuses an adapter on anything but a layer's weight: none is left unmerged.
    assert layers.keys() <= {plain_name(key) for key in base.state_dict()}

    def merge(key: str, weight: Tensor) -> Tensor:
        layer = layers.get(key)
        if layer is None:
            return weight
        # The same sum in the same order as peft's own merge.
        return weight + layer.get_delta_weight("default").to(weight.dtype)

    return adapted, merge
