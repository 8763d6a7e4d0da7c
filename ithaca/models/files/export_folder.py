"""A folder that a model is exported to: whose it is, and how one model takes the place of another without a mixture.

    .ithaca-export.json     the run and checkpoint that the model is of, and the files that were written

A model is written into a hidden folder inside, and its files are moved from there when all are whole; what the mark names
and the new model has not is removed. Only an empty folder, or one with a mark of the same run, is written to unasked.

Invariant: no file of another model is removed, or left beside the new one, unless the caller forces it.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ithaca.atomic import part_of, remove, write_whole
from ithaca.errors import CheckpointError, ConfigError
from ithaca.state.checkpoint import manifest

MARK = ".ithaca-export.json"
_PART = ".ithaca-export.part"
# What transformers and peft read of a folder, and would read of another model beside the one that is written.
_MODEL_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf",
    "*config.json", "adapter*", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*.jinja", "*.model", "*.tiktoken", "modeling_*.py", "configuration_*.py",
)  # fmt: skip
RUN = "run"


@dataclass(frozen=True, slots=True)
class Mark:
    """The run a model is of, its checkpoint by step and sum, and the files that were written of it."""

    run: str
    step: int
    sum: int
    files: tuple[str, ...] = ()

    def same_model(self, other: Mark | None) -> bool:
        return other is not None and (self.run, self.step, self.sum) == (other.run, other.step, other.sum)


def mark_of(checkpoint: Path) -> Mark:
    """Return the mark of a model that is exported from `checkpoint`."""
    run = manifest.read_facts(checkpoint).get(RUN)
    content = json.dumps(manifest.read_manifest(checkpoint), sort_keys=True).encode()
    # Checkpoints of earlier versions do not say which run they are of: its folder stands for it.
    return Mark(str(run or run_of(checkpoint)), manifest.step_of(checkpoint), zlib.crc32(content))


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint is in."""
    parent = checkpoint.resolve().parent
    return parent.parent if parent.name == "checkpoints" else parent


def read_mark(folder: Path) -> Mark | None:
    """Return a folder's mark; None where it has none that can be read."""
    try:
        content = json.loads((folder / MARK).read_text(encoding="utf-8"))
        files = tuple(name for name in content["files"] if name == Path(name).name)
        mark = Mark(content["run"], content["step"], content["sum"], files)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return mark if isinstance(mark.run, str) else None


def write_mark(folder: Path, mark: Mark) -> None:
    """Write the mark, whole or not at all."""
    write_whole(folder / MARK, json.dumps(asdict(mark), indent=1) + "\n")


def export_into(checkpoint: Path, to: Path, write: Callable[[Path], object], *, force: bool = False) -> None:
    """Have `write` put the model of `checkpoint` into the folder `to`; what cannot be done is refused in a sentence."""
    mark = mark_of(checkpoint)
    made = missing_folders(to)
    try:
        to.mkdir(parents=True, exist_ok=True)
        before = _check_content(to, mark, force=force)
        part = to / _PART
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write(part)
        _exchange(part, to, before, mark)
        made = []
    except FileExistsError:
        raise ConfigError(f"--to {to} is a file, or a link that leads nowhere: name a folder") from None
    except OSError as error:
        raise ConfigError(f"--to {to} cannot be written ({error.strerror or error}): name another folder") from None
    finally:
        take_away(to, made)


def missing_folders(to: Path) -> list[Path]:
    """Return the folders that `to` needs and that are not there, the innermost first."""
    return [folder for folder in (to, *to.parents) if not os.path.lexists(folder)]


def take_away(to: Path, made: Sequence[Path]) -> None:
    """Remove what an export that came to no end has left in `to`, and the folders it had made, where they are empty."""
    shutil.rmtree(to / _PART, ignore_errors=True)
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def _check_content(to: Path, mark: Mark, *, force: bool) -> set[str]:
    """Refuse a folder with anything that is not of this run; returns the files that the new model takes the place of."""
    there = read_mark(to)
    own = set(there.files) if there is not None and there.run == mark.run else set()
    strange = {path.name for path in to.iterdir()} - own - {MARK, part_of(to / MARK).name, _PART}
    models = {name for name in strange if any(fnmatch(name, pattern) for pattern in _MODEL_FILES)}
    # In a folder of this run's own a note may lie beside the model, but no other model.
    in_the_way = models if there is not None and there.run == mark.run else strange
    if in_the_way and not force:
        named = ", ".join(sorted(in_the_way)[:3]) + (f" and {len(in_the_way) - 3} more" if len(in_the_way) > 3 else "")
        raise ConfigError(
            f"--to {to} holds {named}, which this run did not write: name a new or empty folder, or use --force to replace "
            "the model there"
        )
    return own | models


def _exchange(part: Path, to: Path, before: set[str], mark: Mark) -> None:
    """Put the new files in place of the old ones; a kill in between leaves a mark that names both."""
    new = {path.name for path in part.iterdir()}
    write_mark(to, replace(mark, files=tuple(sorted(before | new))))
    for name in before:
        remove(to / name)
    for name in sorted(new):
        remove(to / name)
        (part / name).rename(to / name)
    write_mark(to, replace(mark, files=tuple(sorted(new))))


def refuse_own_places(to: Path, run: Path, description: dict[str, Any]) -> None:
    """Refuse a folder that the run, or the model it starts from, lives in; links are followed."""
    real, root = to.resolve(), run.resolve()
    if real == root or real in root.parents:
        what = "the run's own folder" if real == root else f"a folder above the run {run}"
        raise ConfigError(f"--to {to} is {what}: name a folder of its own, such as --to {run / 'model'}")
    for what in ("folder", "tokenizer"):
        if real == Path(str(description.get(what, ""))).absolute():
            raise ConfigError(
                f"--to {to} is where the run takes its {what.replace('folder', 'model')} from: name another"
            )


def description_of(checkpoint: Path, key: str) -> dict[str, Any]:
    """Return what a checkpoint says of its model; CheckpointError where it says nothing."""
    description = manifest.read_facts(checkpoint).get(key)
    if not isinstance(description, dict) or not isinstance(description.get("config"), dict):
        raise CheckpointError(f"{checkpoint} says nothing of its model: it was not written by `ithaca train`")
    return description
