"""Model and tokens of `ithaca verify`: from a run file, a model's folder or name, or an architecture's name.

A run gives its last stage's model (its RoPE as stretched as it gets, its adapters) and the first rows of its data, read
as a stream, so that nothing has to be tokenized first.

Invariant: one process prepares everything before there are ranks, and refuses here what a run could not do. Missing,
misshapen, unreadable or non-finite weights are no fault of sequence parallelism, but a comparison would show them as one:
transformers fills missing weights at random, differently in every process, and NaN is equal to nothing. So a folder has
to pass the checks of `load_weights`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ithaca.attention.kernels import check_name
from ithaca.config.messages import did_you_mean, list_near_paths
from ithaca.config.schema import RunSettings
from ithaca.constants import IGNORE_INDEX
from ithaca.data.prepared import check_id, prepare
from ithaca.data.rows.feed import open_feed
from ithaca.errors import CheckpointError, ConfigError, DataError, UnsupportedError
from ithaca.heads import split_heads
from ithaca.models.files.conversion import WeightConversion
from ithaca.models.files.embedded import build_embedded
from ithaca.models.files.pretrained import change_config, check_adapters, find_folder, known_model, read_config
from ithaca.models.files.read_weights import different_copies, read_generation
from ithaca.models.files.safetensors_files import INDEX, Headers, TensorReader, read_headers
from ithaca.models.files.tokenizer import load_tokenizer
from ithaca.models.files.weight_sources import plan_groups
from ithaca.models.support import ModelParts, check_model
from ithaca.parallelize import head_counts
from ithaca.planning.model.architectures import verdicts
from ithaca.planning.model.config_names import refuse_attention_dropout
from ithaca.planning.model.known_models import nearest_models
from ithaca.training.session import stage_config
from ithaca.verify.batches import Sample, from_rows, made_up
from ithaca.verify.small_models.types import survey_config
from ithaca.verify.small_subject import Subject, empty_of, make_subject

# Tokens of a row: a minute or two on two cores, odd, and at least a dozen tokens a rank.
LENGTH = 47
LEAST_TOKENS_A_RANK = 12
# The share of free memory that the models may take.
_MEMORY_SHARE = 0.8
_ROWS, _TRIED_ROWS = 2, 64


@dataclass(frozen=True, slots=True)
class Material:
    """The input of every rank. `kernel`: the run's attention kernel. `scratch`: a folder that outlives the ranks."""

    subject: Subject
    sample: Sample
    kernel: str
    scratch: Path


def gather(
    run: RunSettings | None,
    model: str,
    *,
    ranks: int,
    layers: int | None,
    length: int | None,
    dtype: torch.dtype,
    scratch: Path,
    changes: Mapping[str, Any] | None = None,
) -> Material:
    """Return the material for `ranks` ranks: of a run, or of `model` alone with `changes` of its config.

    `layers`, `length`: None to have them chosen.
    """
    kernel = "auto" if run is None else run.model.kernel
    check_name(kernel)
    is_name = bool(model) and not Path(model).expanduser().is_dir()
    if run is not None and is_name and (model in verdicts() or known_model(model)):
        raise ConfigError(
            f"--model {model} is a config alone, without the weights and the tokenizer of a run: leave the run file and its "
            "settings out (--sp for mesh.sp), or name a folder"
        )
    if run is None:
        config, folder = config_of_model(model)
        config = change_config(config, changes or {})
    else:
        config, folder = config_of_run(run, scratch / "embedded")
    text: Any = config.get_text_config()
    refuse_attention_dropout(lambda key: getattr(text, key, None))
    check_ranks(config, ranks)
    lora = None if run is None else run.lora
    if lora is not None:
        check_adapters(config, lora)
    # A folder with a config alone is enough for a model, with random weights; a run starts from what it names.
    pretrained = has_weights(folder) if run is None else run.model.weights == "pretrained"
    length = _choose_length(length, ranks, text)
    subject = make_subject(
        config,
        length=length,
        ranks=ranks,
        memory=int(psutil.virtual_memory().available * _MEMORY_SHARE),
        layers=layers,
        folder=folder if pretrained else None,
        dtype=dtype,
        lora=lora,
        seed=0 if run is None else run.seed,
    )
    if folder is not None and pretrained:
        check_weights(config, folder, subject)
    vocabulary = subject.config.get_text_config().vocab_size
    if run is None:
        return Material(subject, made_up(vocabulary, length), kernel, scratch)
    assert folder is not None
    rows = rows_of_run(run, folder, config, length)
    return Material(subject, from_rows(rows, vocabulary, length, "your data"), kernel, scratch)


def _choose_length(asked: int | None, ranks: int, text: Any) -> int:
    """Return the tokens of a row: as asked, or enough for all ranks; a table of learned positions bounds both."""
    length = asked or max(LENGTH, LEAST_TOKENS_A_RANK * ranks - 1)
    positions = int(getattr(text, "max_position_embeddings", 0) or 0)
    if not positions or length <= positions or getattr(text, "rope_parameters", None):
        return length
    if asked:
        raise ConfigError(
            f"--length {asked}: {text.model_type} has learned positions up to {positions:,}; use a length of at most "
            f"{positions}"
        )
    return positions


def config_of_model(name: str) -> tuple[PreTrainedConfig, Path | None]:
    """Return a model's config, and its folder or None.

    `name`: a folder, a name on the hub or in the built-in table, or an architecture, whose small model is taken.
    """
    is_folder = Path(name).expanduser().is_dir()
    known = None if is_folder or name in verdicts() else known_model(name)
    if known is not None:
        return known, None
    if is_folder or "/" in name:
        folder = find_folder(name, typed="--model")
        return read_config(folder), folder
    if name not in verdicts():
        near = [*difflib.get_close_matches(name, verdicts(), 3), *nearest_models(name, 2)]
        hint = did_you_mean(
            [*list_near_paths(Path(name), "config.json"), *near], "`ithaca models` lists the architectures"
        )
        raise ConfigError(f"--model {name!r}: no folder, model or architecture has this name: {hint}")
    if verdicts()[name]["verdict"] != "exact":
        raise UnsupportedError(f"the architecture {name!r} is refused: {verdicts()[name]['reason']}")
    return survey_config(name), None


def config_of_run(run: RunSettings, embedded: Path) -> tuple[PreTrainedConfig, Path]:
    """Return the last stage's config and the folder the run starts from; the embedded model is written to `embedded`."""
    name = run.model.name
    folder = build_embedded(embedded) if name == "embedded" else find_folder(name, run.model.revision)
    return stage_config(run.model, run.stages, str(folder)), folder


def rows_of_run(run: RunSettings, folder: Path, config: PreTrainedConfig, length: int) -> list[dict[str, Tensor]]:
    """Return the first rows of `length` tokens that have targets."""
    tokenizer = load_tokenizer(run.model.tokenizer or str(folder), run.model.revision)
    data = run.data.model_copy(update={"streaming": True})
    validation = run.validation.model_copy(update={"share": 0.0, "sources": []})
    prepared = prepare(data, tokenizer, validation=validation, seed=run.seed, folder=folder)
    feed = open_feed(prepared, length=length, rows=run.data.rows, seed=run.seed)
    found: list[dict[str, Tensor]] = []
    for index in range(_TRIED_ROWS):
        row = feed.row(index)
        # The sample wraps ids around at a cut vocabulary, so ids that the whole vocabulary has not are refused here.
        check_id(feed.describe(index), int(row["input_ids"].max()), config.get_text_config().vocab_size)
        if (row["labels"][:, 1:] != IGNORE_INDEX).any():
            found.append(row)
        if len(found) == _ROWS:
            return found
    raise DataError(
        f"the first {_TRIED_ROWS} rows of {length} tokens hold hardly a token to learn: give a longer --length, or look "
        "at them with `ithaca prepare --show 3`"
    )


def check_ranks(config: PreTrainedConfig, ranks: int) -> None:
    """Refuse what `parallelize` would refuse on the ranks."""
    model = empty_of(config)
    check_model(ModelParts.of(model), allow_untested=False)
    heads, kv_heads = head_counts(model)
    if heads == 1:
        raise UnsupportedError(
            "this model has one attention head, and no rank can do without: there is nothing to split"
        )
    split_heads(heads, kv_heads, ranks)


def has_weights(folder: Path | None) -> bool:
    """True if a folder claims to hold weights, whole or not."""
    return folder is not None and ((folder / INDEX).is_file() or any(folder.glob("*.safetensors")))


def check_weights(config: PreTrainedConfig, folder: Path, subject: Subject) -> None:
    """Refuse a folder that a run could not start from; every number of the weights that are compared is read."""
    headers = read_headers(folder)
    twin = empty_of(config)
    groups = plan_groups(twin, headers, folder)
    read_generation(twin, folder)
    if subject.folder is not None:
        kept = empty_of(subject.config).state_dict().keys()
        _check_numbers([group for group in groups if kept & group.targets.keys()], headers, twin.all_tied_weights_keys)


def _check_numbers(groups: Iterable[WeightConversion], headers: Headers, tied: dict[str, str]) -> None:
    """Refuse a number that is not finite, and a tied weight that the files hold twice with different values."""
    first_keys: dict[str, str] = {}
    with TensorReader(headers) as reader:
        for group in groups:
            for key in group.keys:
                # In fp32, because torch has no isfinite for 8 bits.
                if not bool(reader.whole(key).float().isfinite().all()):
                    raise CheckpointError(
                        f"{headers[key].file}: {key} holds NaN or infinity, which no training mends: copy the weights anew, "
                        "or start from a checkpoint before they went wrong"
                    )
            own, target = group.keys[0], next(iter(group.targets))
            source = tied.get(target, target)
            first = first_keys.setdefault(source, own)
            if first == own or group.converter is not None:
                continue
            if not torch.equal(reader.whole(first), reader.whole(own)):
                raise different_copies(source, tied)
