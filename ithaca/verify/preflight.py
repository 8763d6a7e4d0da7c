"""What `ithaca verify` refuses before a rank is started: a model that is not exact here, too many ranks, a bad folder.

Weights that are missing, of another shape, unreadable or not finite are no fault of sequence parallelism, but a
comparison would show them as one: transformers fills what is missing at random, otherwise in every process, and NaN
is equal to nothing. So a folder is held to what `load_weights` asks of it, by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from ithaca.errors import CheckpointError, UnsupportedError
from ithaca.heads import split_heads
from ithaca.models.files.conversion import Group
from ithaca.models.files.read_weights import different_copies, read_generation
from ithaca.models.files.safetensors_files import INDEX, Headers, TensorReader, read_headers
from ithaca.models.files.weight_sources import plan_groups
from ithaca.models.support import ModelParts, check_model
from ithaca.parallelize import head_counts
from ithaca.verify.small_subject import Subject, empty_of


def check_ranks(config: PreTrainedConfig, ranks: int) -> None:
    """Refuse what `parallelize` would refuse on the ranks, without any."""
    model = empty_of(config)
    check_model(ModelParts.of(model), allow_untested=False)
    heads, kv_heads = head_counts(model)
    if heads == 1:
        raise UnsupportedError(
            "this model has one attention head, and no rank can do without: there is nothing to split"
        )
    split_heads(heads, kv_heads, ranks)


def has_weights(folder: Path | None) -> bool:
    """Whether a folder says that it holds weights, if not that they are whole."""
    return folder is not None and ((folder / INDEX).is_file() or any(folder.glob("*.safetensors")))


def check_weights(config: PreTrainedConfig, folder: Path, subject: Subject) -> None:
    """Refuse a folder whose weights a run could not start from; of those that are compared each number is looked at."""
    headers = read_headers(folder)
    twin = empty_of(config)
    groups = plan_groups(twin, headers, folder)
    read_generation(twin, folder)
    if subject.folder is not None:
        kept = empty_of(subject.config).state_dict().keys()
        _check_numbers([group for group in groups if kept & group.targets.keys()], headers, twin.all_tied_weights_keys)


def _check_numbers(groups: Iterable[Group], headers: Headers, tied: dict[str, str]) -> None:
    """Refuse a number that is not finite, and two values of a weight that is there under two names."""
    whose: dict[str, str] = {}
    with TensorReader(headers) as reader:
        for group in groups:
            for key in group.keys:
                # In fp32, because torch does not ask it of 8 bits.
                if not bool(reader.whole(key).float().isfinite().all()):
                    raise CheckpointError(
                        f"{headers[key].file}: {key} holds NaN or infinity, which no training mends: copy the weights anew, "
                        "or start from a checkpoint before they went wrong"
                    )
            own, target = group.keys[0], next(iter(group.targets))
            source = tied.get(target, target)
            first = whose.setdefault(source, own)
            if first == own or group.converter is not None:
                continue
            if not torch.equal(reader.whole(first), reader.whole(own)):
                raise different_copies(source, tied)
