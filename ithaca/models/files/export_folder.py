"""The folder that a model is exported to: its owner, and the replacement of one model by another without a mixture.

    out/.ithaca-export.json     the mark: run and checkpoint of the model, and the files that were written
    out/.ithaca-export.part/    the new model while it is written; its files move up when all are whole
    out/model.safetensors ...

Files that the old mark names and the new model has not are removed. Without `force` only an empty folder is written to, or
one with a mark of the same run.

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
# Files that transformers and peft read in a folder, so that another model's would mix with the new one.
_MODEL_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf",
    "*config.json", "adapter*", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*.jinja", "*.model", "*.tiktoken", "modeling_*.py", "configuration_*.py",
)  # fmt: skip
RUN = "run"


@dataclass(frozen=True, slots=True)
class ExportMark:
    """The origin of an exported model: its run, its checkpoint by step and checksum, and the files written."""

    run: str
    step: int
    sum: int
    files: tuple[str, ...] = ()

    def same_model(self, other: ExportMark | None) -> bool:
        return other is not None and (self.run, self.step, self.sum) == (other.run, other.step, other.sum)


def mark_of(checkpoint: Path) -> ExportMark:
    """Return the mark of a model exported from `checkpoint`."""
    run = manifest.read_facts(checkpoint).get(RUN)
    content = json.dumps(manifest.read_manifest(checkpoint), sort_keys=True).encode()
    # Checkpoints of earlier versions do not name their run: its folder serves instead.
    return ExportMark(str(run or run_of(checkpoint)), manifest.step_of(checkpoint), zlib.crc32(content))


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint is in."""
    parent = checkpoint.resolve().parent
    return parent.parent if parent.name == "checkpoints" else parent


def read_mark(folder: Path) -> ExportMark | None:
    """Return a folder's mark; None if it has none that can be read."""
    try:
        content = json.loads((folder / MARK).read_text(encoding="utf-8"))
        files = tuple(name for name in content["files"] if name == Path(name).name)
        mark = ExportMark(content["run"], content["step"], content["sum"], files)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return mark if isinstance(mark.run, str) else None


def write_mark(folder: Path, mark: ExportMark) -> None:
    """Write the mark atomically."""
    write_whole(folder / MARK, json.dumps(asdict(mark), indent=1) + "\n")


def export_into(checkpoint: Path, to: Path, write: Callable[[Path], object], *, force: bool = False) -> None:
    """Call `write` to put the model of `checkpoint` into the folder `to`; refuse a folder that cannot take it."""
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
        remove_unfinished(to, made)


def missing_folders(to: Path) -> list[Path]:
    """Return `to` and those of its parents that do not exist, innermost first."""
    return [folder for folder in (to, *to.parents) if not os.path.lexists(folder)]


def remove_unfinished(to: Path, made: Sequence[Path]) -> None:
    """Remove what an interrupted export left in `to`, and the folders `made` for it if they are empty."""
    shutil.rmtree(to / _PART, ignore_errors=True)
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def _check_content(to: Path, mark: ExportMark, *, force: bool) -> set[str]:
    """Refuse a folder with files that are not of this run; return the files that the new model replaces."""
    old = read_mark(to)
    same_run = old is not None and old.run == mark.run
    own = set(old.files) if old is not None and same_run else set()
    foreign = {path.name for path in to.iterdir()} - own - {MARK, part_of(to / MARK).name, _PART}
    models = {name for name in foreign if any(fnmatch(name, pattern) for pattern in _MODEL_FILES)}
    # A folder of this run may hold other files beside the model, but no other model's.
    in_the_way = models if same_run else foreign
    if in_the_way and not force:
        named = ", ".join(sorted(in_the_way)[:3]) + (f" and {len(in_the_way) - 3} more" if len(in_the_way) > 3 else "")
        raise ConfigError(
            f"--to {to} holds {named}, which this run did not write: name a new or empty folder, or use --force to replace "
            "the model there"
        )
    return own | models


def _exchange(part: Path, to: Path, before: set[str], mark: ExportMark) -> None:
    """Replace the old files by the new ones; a kill in between leaves a mark that names both."""
    new = {path.name for path in part.iterdir()}
    write_mark(to, replace(mark, files=tuple(sorted(before | new))))
    for name in before:
        remove(to / name)
    for name in sorted(new):
        remove(to / name)
        (part / name).rename(to / name)
    write_mark(to, replace(mark, files=tuple(sorted(new))))


def refuse_own_folders(to: Path, run: Path, description: dict[str, Any]) -> None:
    """Refuse the folder of the run, of its model or of its tokenizer as the target; links are followed."""
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
    """Return a checkpoint's description of its model; CheckpointError if it has none."""
    description = manifest.read_facts(checkpoint).get(key)
    if not isinstance(description, dict) or not isinstance(description.get("config"), dict):
        raise CheckpointError(f"{checkpoint} says nothing of its model: it was not written by `ithaca train`")
    return description
