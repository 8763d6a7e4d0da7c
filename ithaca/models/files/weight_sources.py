"""What a Hugging Face folder's safetensors hold, and which of it makes which weight of a model.

Only headers are read here. The mapping from names on disk to names in memory is transformers' own; run on meta
tensors it gives every weight's shape, so that what is missing, unexpected or of another shape is known beforehand.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ithaca.errors import CheckpointError
from ithaca.state.weights.finite import check_types

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Header:
    """One tensor of a file; `dtype` as safetensors names it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


Headers = dict[str, Header]


@dataclass(eq=False, slots=True)
class Group:
    """Tensors on disk that make one weight, or several. Without a `converter` there is one of each, and they are equal.

    `ranks`: each key's place among those of its pattern, which is the expert's number in a stack of experts.
    """

    name: str
    converter: Any = None
    keys: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, key: str, pattern: str) -> None:
        self.ranks.append(self.patterns.count(pattern))
        self.keys.append(key)
        self.patterns.append(pattern)

    def convert(self, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What transformers makes of them, by the weights' names."""
        converter = copy.deepcopy(self.converter)
        for key, pattern in zip(self.keys, self.patterns, strict=True):
            if key in tensors:
                converter.add_tensor(self.name, key, pattern, tensors[key])
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    @property
    def stacked(self) -> bool:
        """Whether it is a stack of experts, to which other stacks are joined along another dim at most."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        if self.converter is None or len(self.targets) != 1:
            return False
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in rest)
        )


def read_headers(folder: Path) -> Headers:
    """Every tensor of the folder's safetensors: where it is, its shape and its type."""
    from safetensors import SafetensorError, safe_open

    headers: Headers = {}
    for file in weight_files(folder):
        try:
            with safe_open(str(file), framework="pt") as handle:
                for key in handle.keys():  # noqa: SIM118
                    piece = handle.get_slice(key)
                    headers[key] = Header(file, tuple(piece.get_shape()), piece.get_dtype())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}): copy it anew") from None
    return headers


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors that the folder's weights are in."""
    if (folder / INDEX).is_file():
        try:
            named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{folder / INDEX} cannot be read ({error}): copy it anew") from None
        files = [folder / name for name in sorted(set(named))]
        if any(file.parent != folder for file in files):
            raise CheckpointError(f"{folder / INDEX} names files outside its folder: copy it anew")
    else:
        files = [folder / SINGLE]
    for file in files:
        if file.is_file():
            continue
        if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
            raise CheckpointError(
                f"{folder} has its weights as pickles, which can run code: convert them to safetensors (transformers' "
                "save_pretrained writes them), or name a revision that has them"
            )
        raise CheckpointError(f"{folder} has no {file.name}: weights as safetensors are needed")
    return files


def plan_groups(twin: Any, headers: Headers, folder: Path) -> list[Group]:
    """Who makes what, in the order of the files; all weights of `twin` are made, and nothing else, or it is refused."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(twin)
    groups = _gather(twin, mapping, headers)
    twin._weight_conversions = [each for each in mapping if each.was_used()]
    state = twin.state_dict()
    wanted = {key: tuple(tensor.shape) for key, tensor in state.items()}
    unexpected: list[str] = []
    for group in list(groups):
        if group.name not in wanted:
            unexpected += group.keys
            groups.remove(group)
            continue
        group.targets = _shapes(group, twin, headers, folder)
    made = {name: shape for group in groups for name, shape in group.targets.items()}
    _refuse(folder, "misses", _missing(twin, wanted, made))
    _refuse(folder, "has, unexpectedly,", _not_ignored(twin, unexpected + sorted(made.keys() - wanted.keys())))
    wrong = [
        f"{key} {list(made[key])} for {list(wanted[key])}"
        for key in wanted
        if made.get(key, wanted[key]) != wanted[key]
    ]
    _refuse(folder, "has of another shape", wrong)
    trained = {
        key
        for group in groups
        if any(name in state and state[name].is_floating_point() for name in group.targets)
        for key in group.keys
    }
    check_types(folder, {key: header.dtype for key, header in headers.items()}, sorted(trained))
    return sorted(groups, key=lambda group: (headers[group.keys[0]].file, group.keys[0]))


def _gather(twin: Any, mapping: list[Any], headers: Headers) -> list[Group]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = twin.state_dict()
    prefix = twin.base_model_prefix
    groups: dict[str, Group] = {}
    for key in sorted(headers, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        converter = None if pattern is None else by_pattern[pattern]
        groups.setdefault(name, Group(name, converter)).add(key, pattern or key)
    return list(groups.values())


def _shapes(group: Group, twin: Any, headers: Headers, folder: Path) -> dict[str, tuple[int, ...]]:
    if group.converter is None:
        return {group.name: headers[group.keys[0]].shape}
    empty = {key: torch.empty(headers[key].shape, device="meta") for key in group.keys}
    try:
        return {name: tuple(tensor.shape) for name, tensor in group.convert(twin, empty).items()}
    except Exception as error:
        raise CheckpointError(
            f"{folder}: {group.name} cannot be made of {', '.join(group.keys[:_NAMED])} ({error}): the weights are not "
            "of this config"
        ) from error


def _missing(twin: Any, wanted: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """Of tied weights one is enough."""
    tied: dict[str, str] = dict(twin.all_tied_weights_keys)
    there = {tied.get(key, key) for key in made}
    return [key for key in wanted if tied.get(key, key) not in there]


def _not_ignored(twin: Any, keys: Iterable[str]) -> list[str]:
    """Without what transformers itself passes over, the rotary frequencies of old folders among it."""
    patterns = {*(twin._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"}
    return [key for key in keys if not any(re.search(pattern, key) for pattern in patterns)]


def _refuse(folder: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise CheckpointError(
            f"{folder} {what} {', '.join(names[:_NAMED])}{more}: its weights are not those of its config.json"
        )
