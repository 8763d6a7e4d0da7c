"""Files and format of a source: a path, a glob, a folder, the standard library or a hub name.

    folder with .jsonl, .ndjson or .parquet   those files alone, as rows
    folder of texts                           all texts and source files, each one document
    repository, folder of source code         handwritten files: no version control, vendored, built, binary, huge files

Only files that `include` names count, also when the format is chosen. `FoundSource.notes` has counts of the files that are
not read, by suffix and reason.

Invariant: the same files in the same order on every machine that has the same content under the same path.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shlex
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path, PurePath

from ithaca.config.messages import near_paths
from ithaca.config.schema import SourceSettings
from ithaca.data.sources.folders import (
    HUGE,
    VENDORED,
    SkippedFiles,
    is_vendored,
    reason_not_handwritten,
    suffix_of,
    walk,
)
from ithaca.data.sources.source_names import SourceKey
from ithaca.errors import DataError

STDLIB = "stdlib"
_FORMATS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "text": (".txt", ".md", ".rst", ".text"),
}
_TABLES = (".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xlsx", ".xls", ".sqlite", ".db")
_JSON_LINES = (".jsonl", ".ndjson")
# Beside texts these are settings, not documents.
_SETTINGS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".properties")
_SUFFIXES = {suffix: kind for kind, suffixes in _FORMATS.items() for suffix in suffixes}
# Tests, and pydoc's generated table.
_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "pydoc_data"})
_TOO_LARGE = "too large"


@dataclass(frozen=True, slots=True)
class FoundSource:
    """Source whose files are known.

    `name`: name in messages. `files`: empty for a hub name. `huge`: texts that are too large to be among `files`.
    `others`: line about the other files that are not read. `texts`: suffix of texts among those, in a folder of rows.
    `key`: key of the source among the run's settings.
    """

    source: SourceSettings
    format: str
    name: str
    files: tuple[str, ...]
    huge: tuple[str, ...] = ()
    others: str = ""
    key: SourceKey = field(default_factory=SourceKey)
    texts: str = ""

    @property
    def advice(self) -> str:
        """End of a message: choose a folder's files by `include`; empty for a single file."""
        if len(self.files) < 2 and not self.texts:
            return ""
        files = f"*{self.texts}" if self.texts else f"part-*{PurePath(self.files[0]).suffix}"
        chosen = f'{self.key.setting("include")}=["{files}"]'
        return f", or choose the files to read, such as {shlex.quote(chosen)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about files that are not read; none if all are."""
        huge = ""
        if self.huge:
            more = f" and {len(self.huge) - 1:,} more" if len(self.huge) > 1 else ""
            huge = (
                f"left out of {self.name} for being over {HUGE >> 20} MiB: {self.huge[0]}{more}; to train on such files "
                "name them as sources of their own"
            )
        return tuple(line for line in (huge, self.others) if line)

    def fingerprint(self) -> str:
        """Return a hash of the settings and the files' names, sizes and times; of a hub name, of the name alone."""
        try:
            facts = [(file, (stat := os.stat(file)).st_size, stat.st_mtime_ns) for file in self.files]
        except OSError as error:
            raise DataError(f"{error.filename} was there a moment ago and is gone ({error.strerror})") from None
        text = repr((self.format, self.source.model_dump_json(), facts))
        return hashlib.sha256(text.encode()).hexdigest()


def locate(source: SourceSettings, key: SourceKey | None = None) -> FoundSource:
    """Find the files of a source; DataError if there are none. `key`: key of the source among the run's settings."""
    key = key or SourceKey()
    return replace(_locate(source, key), key=key)


def _locate(source: SourceSettings, key: SourceKey) -> FoundSource:
    if source.path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return FoundSource(
            source, "code", STDLIB, _require_some(_stdlib(root), source, key, f"no .py files under {root}")
        )
    # A path that exists wins over a glob or a hub name of the same spelling.
    given = os.path.expanduser(source.path)
    if os.path.isdir(given):
        kind = _folder_format(given, source, key) if source.format in ("auto", "hub") else source.format
        return _folder(given, kind, source, key)
    if os.path.isfile(given):
        return FoundSource(source, _file_format(given, source, key), source.path, (given,))
    if glob.has_magic(given):
        files = sorted(file for file in glob.glob(given, recursive=True) if os.path.isfile(file))
        found = _require_some(files, source, key, f"no file matches {source.path!r}")
        return FoundSource(source, _one_format(found, source, key), source.path, found)
    may_be_hub, near = _may_be_hub(source.path), near_paths(Path(given))
    # A similar name here makes a mistyped path likelier than a hub name, and the hub is asked only after long imports.
    if source.format == "hub" or (source.format == "auto" and may_be_hub and not near):
        return FoundSource(source, "hub", source.path, ())
    hub = (
        f"; for the dataset on the hub, add {key.setting('format')}=hub"
        if may_be_hub and source.format == "auto"
        else ""
    )
    raise DataError(
        f"{source.path!r} is no file or folder here (the working folder is {Path.cwd()}): type {key.words()}{near}{hub}"
    )


def folder_format_or_empty(folder: str, source: SourceSettings, key: SourceKey) -> str:
    """Return the format of a folder as it is now; empty if its files do not decide it."""
    try:
        return _folder_format(folder, source, key)
    except DataError:
        return ""


def is_included(source: SourceSettings, file: str) -> bool:
    """True if `include` names the file or is empty."""
    return not source.include or any(_matches(file, pattern) for pattern in source.include)


def reads_suffix(kind: str, file: str) -> bool:
    """True if a folder of this format may read a file of this name."""
    suffix = suffix_of(file)
    others = (*_SETTINGS, *_FORMATS["jsonl"], *_FORMATS["parquet"], *_TABLES)
    return kind == "code" or (suffix not in others if kind == "text" else suffix in _FORMATS[kind])


def _may_be_hub(path: str) -> bool:
    """True for `owner/name` or `name`, without a suffix that only files have."""
    plain = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path) is not None
    return plain and suffix_of(path) not in (*_SUFFIXES, *_TABLES, ".py", ".zip", ".tar")


def _file_format(file: str, source: SourceSettings, key: SourceKey) -> str:
    if source.format not in ("auto", "hub"):
        return source.format
    if suffix_of(file) in _TABLES:
        raise DataError(
            f"{file} is a table of a kind that is not read: write it as jsonl or parquet, or set "
            f"{key.setting('format')}=text to train on it as one document"
        )
    return _SUFFIXES.get(suffix_of(file), "text")


def _one_format(files: Sequence[str], source: SourceSettings, key: SourceKey) -> str:
    kinds = {_file_format(file, source, key) for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"{source.path!r} matches files of several formats ({', '.join(sorted(kinds))}): set "
            f"{key.setting('format')}, or give each format a source of its own"
        )
    return kinds.pop()


def _folder_format(folder: str, source: SourceSettings, key: SourceKey) -> str:
    """Return the format of a folder: code for a repository, else by the names of the included files."""
    if _is_repository(folder):
        return "code"
    own = _likely_format(folder, _included(walk(folder, VENDORED), source), key)
    if own == "code":
        return own
    # `data/out/*.txt` is data although `out` is the name of a built folder: look into those folders too. Generated
    # sources in them do not turn a folder of texts into code.
    every = _likely_format(folder, _included(walk(folder), source), key)
    return own if every == "code" else every


def _is_repository(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, ".git"))


def _likely_format(folder: str, files: Iterable[str], key: SourceKey) -> str:
    """Return the format that the files' names suggest; several formats of rows at once are refused."""
    suffixes = [suffix_of(file) for file in files]
    texts = sum(suffix in _FORMATS["text"] for suffix in suffixes)
    # A .json beside other files holds settings; alone it is the data.
    lines = any(suffix in _JSON_LINES for suffix in suffixes) or set(suffixes) == {".json"}
    tables = ".parquet" in suffixes
    if lines and tables:
        raise DataError(
            f"{folder!r} holds jsonl and parquet files: set {key.setting('format')}, or name the files by a glob"
        )
    if lines or tables:
        return "jsonl" if lines else "parquet"
    unread = [suffix for suffix in suffixes if suffix in _TABLES]
    if unread and 2 * sum(suffix in (*_TABLES, ".json") for suffix in suffixes) > len(suffixes):
        raise DataError(
            f"{folder!r} holds tables of a kind that is not read ({', '.join(sorted(set(unread)))}): write them as jsonl or "
            "parquet (datasets.load_from_disk(...).to_parquet(...) for a folder that save_to_disk wrote)"
        )
    return "text" if 2 * texts >= len(suffixes) else "code"


def _folder(folder: str, kind: str, source: SourceSettings, key: SourceKey) -> FoundSource:
    written = kind == "code" or _is_repository(folder)
    skipped, huge = SkippedFiles(), []
    found = []
    # With `include` the user has chosen the files, and needs no count of the skipped ones.
    counted = None if source.include else skipped
    files = [*_included(walk(folder, VENDORED if written else (), counted), source)]
    lines = kind == "jsonl" and any(suffix_of(file) in _JSON_LINES for file in files)
    for file in files:
        reason = _reason_to_skip(folder, file, kind, source, beside_lines=lines)
        if not reason:
            found.append(file)
        elif reason == _TOO_LARGE:
            huge.append(file)
        else:
            skipped.add(file, reason)
    expected = f"text below {HUGE >> 20} MiB, not vendored" if kind == "code" else ", ".join(_FORMATS[kind])
    nothing = f"{source.path!r} has no {kind} files ({expected})"
    note = skipped.describe(source.path)
    if not found:
        raise _nothing_found(source, key, nothing + (f"; {note}" if note else ""))
    texts = skipped.most(_FORMATS["text"]) if kind in ("jsonl", "parquet") else ""
    return FoundSource(source, kind, source.path, tuple(found), tuple(huge), note, texts=texts)


def _reason_to_skip(folder: str, file: str, kind: str, source: SourceSettings, *, beside_lines: bool) -> str:
    """Return the reason why a folder's file is no document of this format; empty if it is one."""
    if kind == "code":
        return _reason_no_source(file)
    suffix = suffix_of(file)
    chosen = bool(source.include) and (source.format != "auto" or kind == "text" or suffix not in _SUFFIXES)
    if chosen or (suffix in _FORMATS[kind] and (source.include or suffix in _JSON_LINES or not beside_lines)):
        return ""
    if kind != "text":
        return f"beside {' and '.join(_JSON_LINES)}" if suffix in _FORMATS[kind] else f"not {kind}"
    if suffix in _SETTINGS:
        return "settings"
    if suffix in (*_FORMATS["jsonl"], *_FORMATS["parquet"], *_TABLES):
        return "rows of data: name them as a source of their own"
    return "vendored or built" if is_vendored(folder, file) else _reason_no_source(file)


def _reason_no_source(file: str) -> str:
    return reason_not_handwritten(file) or (_TOO_LARGE if os.path.getsize(file) > HUGE else "")


def _require_some(files: Iterable[str], source: SourceSettings, key: SourceKey, nothing: str) -> tuple[str, ...]:
    """Return the files that `include` names; a source without any is an error."""
    found = tuple(_included(files, source))
    if not found:
        raise _nothing_found(source, key, nothing)
    return found


def _nothing_found(source: SourceSettings, key: SourceKey, nothing: str) -> DataError:
    also = f" that include={source.include} lets through" if source.include else ""
    return DataError(f"{nothing}{also}: type {key.words()}, or correct its format and include")


def _included(files: Iterable[str], source: SourceSettings) -> Iterator[str]:
    return (file for file in files if is_included(source, file))


def _matches(file: str, pattern: str) -> bool:
    return fnmatch(PurePath(file).name, pattern) or fnmatch(file, pattern) or PurePath(file).match(pattern)


def _stdlib(root: Path) -> Iterator[str]:
    for file in walk(str(root), VENDORED):
        parts = PurePath(file).relative_to(root).parts
        if file.endswith(".py") and not _NOT_STDLIB & set(parts) and os.path.getsize(file):
            yield file
