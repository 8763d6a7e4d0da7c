"""Refusal of a run that would read its own files as documents at its next start, or write over its sources.

A run writes into `output` and its cache. Paths are compared resolved, so a link or a relative path hides nothing. Files
that a source's format, its `include` or the rules of folders skip are not refused.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ithaca.config.schema import RunSettings, SourceSettings
from ithaca.data.sources.folders import VENDORED
from ithaca.data.sources.locate import STDLIB, folder_format_or_empty, is_included, reads_suffix
from ithaca.data.sources.source_names import SourceKey, sources_of
from ithaca.errors import DataError

# Files of every run that could be taken for documents, below its folder and its cache.
_RUN = ("run.yaml", "metrics.jsonl", "checkpoints/step-00000001/facts.json", "embedded/config.json",
        "tokenizer/tokenizer.json", "stages/1-1/config.json", "stages/1-1/chat_template.jinja",
        "export-step-1/config.json")  # fmt: skip
_CACHE = (f"{24 * '0'}/about.json",)


@dataclass(frozen=True, slots=True)
class _RunFile:
    """File that the run will write, with the setting that decides its folder, and the setting's value."""

    file: Path
    setting: str
    value: str


def refuse_own_files(run: RunSettings) -> None:
    """Raise DataError if a source of the run contains, or is, a file that the run writes."""
    for source, key, written in _read_again(run):
        raise DataError(
            f"{written.setting}={written.value} puts files of the run ({written.file.name}) where {source.path!r} is read, "
            f"and the next start would take them for documents: type {written.setting}={_elsewhere(run, source, written)}, "
            f"or name documents that lie apart with {key.words()}"
        )


def _read_again(run: RunSettings) -> Iterator[tuple[SourceSettings, SourceKey, _RunFile]]:
    """Yield each file that the run would write and a source would read, with that source."""
    for source, key in sources_of(run):
        if source.path != STDLIB:
            yield from ((source, key, each) for each in _written(run) if _reads(source, each.file, key))


def _written(run: RunSettings) -> Iterator[_RunFile]:
    root = Path(run.output).resolve()
    for name in _RUN:
        yield _RunFile(root / name, "output", run.output)
    cache = Path(run.data.cache).resolve() if run.data.cache else root / "data"
    for name in _CACHE:
        yield _RunFile(cache / name, *(("data.cache", run.data.cache) if run.data.cache else ("output", run.output)))


def _reads(source: SourceSettings, file: Path, key: SourceKey) -> bool:
    """True if the source, as it is now, would read this file; paths are resolved."""
    given = Path(source.path).expanduser()
    if given.is_dir():
        folder = given.resolve()
        return file.is_relative_to(folder) and _read_in(folder, file, source, key)
    if given.exists() or not glob.has_magic(source.path):
        return file == given.resolve()
    return _matches(given, file) and is_included(source, str(file))


def _read_in(folder: Path, file: Path, source: SourceSettings, key: SourceKey) -> bool:
    inner = file.relative_to(folder).parts
    if any(part.startswith(".") for part in inner) or not is_included(source, str(file)):
        return False
    auto = source.format in ("auto", "hub")
    kind = folder_format_or_empty(str(folder), source, key) if auto else source.format
    if kind == "code" and any(part.lower() in VENDORED for part in inner[:-1]):
        return False
    # With format "auto" the names of all files decide the format, the run's own files among them.
    return auto or reads_suffix(kind, file.name)


def _matches(pattern: Path, file: Path) -> bool:
    """True if a glob, resolved up to its first magic part, matches the file."""
    parts = pattern.absolute().parts
    first = next(at for at, part in enumerate(parts) if glob.has_magic(part))
    return _fits((*Path(*parts[:first]).resolve().parts, *parts[first:]), file.parts)


def _fits(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _fits(pattern[1:], parts) or (not parts[0].startswith(".") and _fits(pattern, parts[1:]))
    hidden = parts[0].startswith(".") and not pattern[0].startswith(".")
    return not hidden and fnmatch(parts[0], pattern[0]) and _fits(pattern[1:], parts[1:])


def _elsewhere(run: RunSettings, source: SourceSettings, written: _RunFile) -> str:
    """Return a folder that no source reads, beside the source or above it; absolute if the refused folder is."""
    given = Path(source.path).expanduser()
    while glob.has_magic(str(given)):
        given = given.parent
    given = given.resolve()
    name = written.setting.rpartition(".")[2]
    for above in given.parents:
        moved = above / f"{given.name or 'documents'}-{'run' if name == 'output' else name}"
        data = run.data.model_copy(update={"cache": str(moved)})
        other = run.model_copy(update={"output": str(moved)} if name == "output" else {"data": data})
        if not moved.exists() and all(each.setting != written.setting for *_, each in _read_again(other)):
            return str(moved) if Path(written.value).is_absolute() else os.path.relpath(moved)
    return "..."
