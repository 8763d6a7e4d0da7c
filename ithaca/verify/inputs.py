"""What `ithaca verify` is given, as a model and tokens: a run file, a model's folder or name, or an architecture's.

Of a run it is the last stage's model (its positions as stretched as they get, its adapters on it) and the first rows
of its data, read as a stream, so that nothing has to be tokenized before.

Invariant: all of it is made in one process before there are ranks, and what a run could not do is refused then.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ithaca.attention.kernels import check_name
from ithaca.config.schema import Run
from ithaca.constants import IGNORE_INDEX
from ithaca.data.prepared import check_id, prepare
from ithaca.data.rows.feed import open_feed
from ithaca.errors import ConfigError, DataError, UnsupportedError
from ithaca.models.files.embedded import build_embedded
from ithaca.models.files.pretrained import change_config, check_adapters, find_folder, known_model, read_config
from ithaca.models.files.tokenizer import load_tokenizer
from ithaca.planning.model.architectures import verdicts
from ithaca.planning.model.config_names import refuse_attention_dropout
from ithaca.planning.model.known_models import nearest_models
from ithaca.training.session import stage_config
from ithaca.verify.batches import Sample, from_rows, made_up
from ithaca.verify.preflight import check_ranks, check_weights, has_weights
from ithaca.verify.small_models.types import survey_config
from ithaca.verify.small_subject import Subject, make_subject

# A sample that ends within a minute or two on two cores, odd, and of a dozen tokens a rank at least.
LENGTH = 47
LEAST_A_RANK = 12
# Of the memory that is free.
_SHARE = 0.8
_ROWS, _TRIES = 2, 64


@dataclass(frozen=True, slots=True)
class Material:
    """What ranks run the checks on. `kernel`: the attention kernel that the run asks for. `scratch`: a folder that is
    there until all ranks have ended."""

    subject: Subject
    sample: Sample
    kernel: str
    scratch: Path


def gather(
    run: Run | None,
    model: str,
    *,
    ranks: int,
    layers: int | None,
    length: int | None,
    dtype: torch.dtype,
    scratch: Path,
    changes: Mapping[str, Any] | None = None,
) -> Material:
    """The material for `ranks` ranks: of a run, or of `model` alone, whose config then gets `changes`.

    `layers`, `length`: None to have them chosen.
    """
    kernel = "auto" if run is None else run.model.kernel
    check_name(kernel)
    if (
        run is not None
        and model
        and not Path(model).expanduser().is_dir()
        and (model in verdicts() or known_model(model))
    ):
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
    # A folder with a config alone will do for a model, whose weights are then random; a run starts from what it names.
    pretrained = has_weights(folder) if run is None else run.model.weights == "pretrained"
    length = _length(length, ranks, config.get_text_config())
    subject = make_subject(
        config,
        length=length,
        ranks=ranks,
        room=int(psutil.virtual_memory().available * _SHARE),
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


def _length(asked: int | None, ranks: int, text: Any) -> int:
    """Tokens of a row: what was asked for, or enough for all ranks; no more than a table of learned positions has."""
    wanted = asked or max(LENGTH, LEAST_A_RANK * ranks - 1)
    known = int(getattr(text, "max_position_embeddings", 0) or 0)
    if not known or wanted <= known or getattr(text, "rope_parameters", None):
        return wanted
    if asked:
        raise ConfigError(
            f"--length {asked}: {text.model_type} has learned positions up to {known:,}; use a length of at most {known}"
        )
    return known


def config_of_model(name: str) -> tuple[PreTrainedConfig, Path | None]:
    """Of a folder (or a hub name) and where that is, of the built-in table, or of a small model of an architecture."""
    there = Path(name).expanduser().is_dir()
    known = None if there or name in verdicts() else known_model(name)
    if known is not None:
        return known, None
    if there or "/" in name:
        folder = find_folder(name, typed="--model")
        return read_config(folder), folder
    if name not in verdicts():
        near = [*difflib.get_close_matches(name, verdicts(), 3), *nearest_models(name, 2)]
        hint = f"did you mean {', '.join(near)}?" if near else "`ithaca models` lists the architectures"
        raise ConfigError(f"--model {name}: no folder here, no known model and no architecture is called so; {hint}")
    if verdicts()[name]["verdict"] != "exact":
        raise UnsupportedError(f"the architecture {name!r} is refused: {verdicts()[name]['reason']}")
    return survey_config(name), None


def config_of_run(run: Run, embedded: Path) -> tuple[PreTrainedConfig, Path]:
    """The last stage's config, and the folder the run starts from; the embedded model is made in `embedded`."""
    name = run.model.name
    folder = build_embedded(embedded) if name == "embedded" else find_folder(name, run.model.revision)
    return stage_config(run, str(folder), len(run.stages) - 1), folder


def rows_of_run(run: Run, folder: Path, config: PreTrainedConfig, length: int) -> list[dict[str, Tensor]]:
    """The first rows of `length` tokens that have targets."""
    tokenizer = load_tokenizer(run.model.tokenizer or str(folder), run.model.revision)
    data = run.data.model_copy(update={"streaming": True})
    validation = run.validation.model_copy(update={"share": 0.0, "sources": []})
    prepared = prepare(data, tokenizer, validation=validation, seed=run.seed, folder=folder)
    feed = open_feed(prepared, length=length, rows=run.data.rows, seed=run.seed)
    found: list[dict[str, Tensor]] = []
    for index in range(_TRIES):
        row = feed.row(index)
        # A model whose vocabulary is cut for the proof takes any id: what the whole one has not is told here.
        check_id(feed.describe(index), int(row["input_ids"].max()), config.get_text_config().vocab_size)
        if (row["labels"][:, 1:] != IGNORE_INDEX).any():
            found.append(row)
        if len(found) == _ROWS:
            return found
    raise DataError(
        f"the first {_TRIES} rows of {length} tokens hold hardly a token to learn: give a longer --length, or look "
        "at them with `ithaca prepare --show 3`"
    )
