"""The tensors of a Hugging Face folder that make each weight of a model, checked before any tensor is read.

The mapping from names on disk to names in memory is transformers' own (`conversion.py`). Run on meta tensors, it gives
every weight's shape, so that missing, unexpected and misshapen weights are refused by the files' headers alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ithaca.errors import CheckpointError
from ithaca.models.files.conversion import WeightConversion, group_by_weight, not_ignored
from ithaca.models.files.safetensors_files import Headers
from ithaca.state.weights.finite import check_types

_NAMED = 5


def plan_groups(twin: Any, headers: Headers, folder: Path) -> list[WeightConversion]:
    """Return the tensors that make each weight, in the order of the files.

    Raise CheckpointError unless they make exactly the weights of the model `twin`.
    """
    groups = group_by_weight(twin, headers)
    state = twin.state_dict()
    expected = {key: tuple(tensor.shape) for key, tensor in state.items()}
    unexpected: list[str] = []
    for group in list(groups):
        if group.name not in expected:
            unexpected += group.keys
            groups.remove(group)
            continue
        group.targets = _shapes(group, twin, headers, folder)
    made = {name: shape for group in groups for name, shape in group.targets.items()}
    _refuse(folder, "misses", _missing(twin, expected, made))
    _refuse(folder, "has, unexpectedly,", not_ignored(twin, unexpected + sorted(made.keys() - expected.keys())))
    wrong = [
        f"{key} {list(made[key])} for {list(expected[key])}"
        for key in expected
        if made.get(key, expected[key]) != expected[key]
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


def _shapes(group: WeightConversion, twin: Any, headers: Headers, folder: Path) -> dict[str, tuple[int, ...]]:
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


def _missing(twin: Any, expected: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """Return the weights that no tensor makes; one name of a tied weight is enough."""
    tied: dict[str, str] = dict(twin.all_tied_weights_keys)
    present = {tied.get(key, key) for key in made}
    return [key for key in expected if tied.get(key, key) not in present]


def _refuse(folder: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise CheckpointError(
            f"{folder} {what} {', '.join(names[:_NAMED])}{more}: its weights are not those of its config.json"
        )
