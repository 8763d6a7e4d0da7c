"""transformers' conversion of weights: tensors on disk become weights in memory, and back.

    experts.0.w1.weight, experts.0.w3.weight, experts.1.w1.weight, ...   on disk
    experts.gate_up_proj                                                 in memory

The tables and their operations are private to transformers (`conversion_mapping`, `core_model_loading`), and so are some
attributes of a model's class. This file alone uses them; `tests/models/files/test_conversion.py` fails if another version
changes one of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

# Versions of transformers on which the tests of this file passed.
CHECKED = ("5.23",)


@dataclass(eq=False, slots=True)
class WeightConversion:
    """Tensors on disk that make one weight or several. Without a `converter` one tensor is one weight, unchanged.

    `ranks`: each key's number among the keys of its pattern: the expert's number in a stack of experts.
    """

    name: str
    converter: Any = None
    keys: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, key: str, pattern: str) -> None:
        """Add a tensor on disk."""
        self.ranks.append(self.patterns.count(pattern))
        self.keys.append(key)
        self.patterns.append(pattern)

    def convert(self, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that transformers makes of the tensors, by their names in memory."""
        converter = copy.deepcopy(self.converter)
        for key, pattern in zip(self.keys, self.patterns, strict=True):
            if key in tensors:
                converter.add_tensor(self.name, key, pattern, tensors[key])
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    @property
    def stacked(self) -> bool:
        """True for a stack of experts along dim 0, perhaps of several projections concatenated along another dim."""
        if self.converter is None or len(self.targets) != 1:
            return False
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in rest)
        )


def group_by_weight(twin: Any, keys: Iterable[str]) -> list[WeightConversion]:
    """Return the groups of the tensors `keys` on disk, and mark the model `twin` with the conversions they need."""
    mapping = get_model_conversion_mapping(twin)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = twin.state_dict()
    prefix = twin.base_model_prefix
    groups: dict[str, WeightConversion] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        converter = None if pattern is None else by_pattern[pattern]
        groups.setdefault(name, WeightConversion(name, converter)).add(key, pattern or key)
    twin._weight_conversions = [each for each in mapping if each.was_used()]
    return list(groups.values())


def names_on_disk(base: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` as transformers writes it: by the conversions that loading had used, if the model was loaded."""
    converted: dict[str, Tensor] = revert_weight_conversion(base, state)
    return converted


def copy_conversions(source: Any, target: Any) -> None:
    """Have `target` written under the names that `source` was loaded from."""
    target._weight_conversions = source._weight_conversions


def describe_conversions(base: Any) -> list[str] | None:
    """Return the conversions that loading had used, as text for a checkpoint; None if nothing was loaded."""
    used = getattr(base, "_weight_conversions", None)
    return None if used is None else [repr(each) for each in used]


def restore_conversions(twin: Any, described: list[str] | None) -> None:
    """Mark an empty model with the conversions that `describe_conversions` has described."""
    if described is not None:
        known = get_model_conversion_mapping(twin)
        twin._weight_conversions = [each for each in known if repr(each) in described]


def not_ignored(twin: Any, keys: Iterable[str]) -> list[str]:
    """Return `keys` without those that transformers passes over, the rotary frequencies of old folders among them."""
    patterns = {*(twin._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"}
    return [key for key in keys if not any(re.search(pattern, key) for pattern in patterns)]


def not_written(base: Any) -> set[str]:
    """Return the names that transformers does not write, above all those of tensors that have another name too."""
    return {*(base._keys_to_ignore_on_save or ()), *(getattr(base, "all_tied_weights_keys", None) or {})}
