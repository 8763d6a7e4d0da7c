"""What `ithaca verify` is given, as configs and tokens: a run file, a model's folder or name, or an architecture's.

Of a run it is the last stage's model (its positions as stretched as they get) and the first rows of its data, read
as a stream, so that nothing has to be tokenized before.
"""

from __future__ import annotations

import difflib
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from ithaca.config import Run
from ithaca.data.feed import open_feed
from ithaca.data.prepare import prepare
from ithaca.errors import ConfigError, DataError, UnsupportedError
from ithaca.mesh import Mesh
from ithaca.models.embedded import build_embedded
from ithaca.models.pretrained import find_folder, known_model, read_config
from ithaca.models.support import verdicts
from ithaca.models.tokenizer import load_tokenizer
from ithaca.planning.known_models import nearest_models
from ithaca.proof.small_more import survey_config
from ithaca.training.session import stage_config

# Of the memory that is free.
_SHARE = 0.8
_TRIES = 64


def config_of_model(name: str) -> tuple[PreTrainedConfig, Path | None]:
    """Of a folder (or a hub name) and where that is, of the built-in table, or of a small model of an architecture."""
    there = Path(name).expanduser().is_dir()
    known = None if there or name in verdicts() else known_model(name)
    if known is not None:
        return known, None
    if there or "/" in name:
        folder = find_folder(name)
        return read_config(folder), folder
    if name not in verdicts():
        near = [*difflib.get_close_matches(name, verdicts(), 3), *nearest_models(name, 2)]
        hint = f"did you mean {', '.join(near)}?" if near else "`ithaca models` lists the architectures"
        raise ConfigError(f"--model {name}: no folder here, no known model and no architecture is called so; {hint}")
    if verdicts()[name]["verdict"] != "exact":
        raise UnsupportedError(f"the architecture {name!r} is refused: {verdicts()[name]['reason']}")
    return survey_config(name), None


def config_of_run(run: Run, mesh: Mesh, embedded: Path) -> tuple[PreTrainedConfig, Path]:
    """The last stage's config, and the folder the run starts from; the embedded model is made in `embedded`."""
    if run.model.name == "embedded":
        if mesh.rank == 0:
            build_embedded(embedded)
        dist.barrier(mesh.world_group)
        folder = embedded
    else:
        folder = find_folder(run.model.name, run.model.revision)
    return stage_config(run, str(folder), len(run.stages) - 1), folder


def rows_of_run(run: Run, folder: Path, mesh: Mesh, length: int, wanted: int) -> list[dict[str, Tensor]]:
    """The first `wanted` rows of `length` tokens that have targets, read by rank 0 and told to all."""
    told: list[Any] = [None]
    if mesh.rank == 0:
        told = [_read_rows(run, folder, length, wanted)]
    dist.broadcast_object_list(told, src=0, group=mesh.world_group)
    return told[0]


def _read_rows(run: Run, folder: Path, length: int, wanted: int) -> list[dict[str, Tensor]]:
    tokenizer = load_tokenizer(run.model.tokenizer or str(folder), run.model.revision)
    data = run.data.model_copy(update={"streaming": True})
    validation = run.validation.model_copy(update={"share": 0.0, "sources": []})
    prepared = prepare(data, tokenizer, validation=validation, seed=run.seed, folder=folder)
    feed = open_feed(prepared, length=length, rows=run.data.rows, seed=run.seed)
    found: list[dict[str, Tensor]] = []
    for index in count():
        row = feed.row(index)
        if (row["labels"][:, 1:] != -100).any():
            found.append(row)
        if len(found) == wanted:
            return found
        if index == _TRIES:
            raise DataError(
                f"the first {_TRIES} rows of {length} tokens hold hardly a token to learn: give a longer --length, or look "
                "at them with `ithaca prepare --show 3`"
            )
    raise AssertionError("count() has no end")


def agree_on_room(mesh: Mesh) -> int:
    """Bytes of memory that all ranks of this machine may use together, as rank 0 sees it."""
    told = [int(psutil.virtual_memory().available * _SHARE) if mesh.rank == 0 else 0]
    dist.broadcast_object_list(told, src=0, group=mesh.world_group)
    return told[0]
