"""Which files a source is: a path, a glob, a folder, the standard library or a hub name, and how they are read.

`locate` finds the format out from what is there, of which only what `include` lets through counts, and walks folders in
sorted order. A folder with rows (.jsonl, .ndjson, .parquet) gives these alone; one of texts gives all texts and sources
in it, whatever their suffixes; a code repository gives what people wrote by hand, without version control, vendored and
built folders, binary and huge files. Each folder's files that are not read are counted by suffix and
reason in `Located.notes`.

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
from ithaca.config.schema import Source
from ithaca.data.sources.folders import HUGE, VENDORED, Tally, is_vendored, suffix_of, walk, why_not_written
from ithaca.data.sources.source_names import Typed
from ithaca.errors import DataError

STDLIB = "stdlib"
_FORMATS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "text": (".txt", ".md", ".rst", ".text"),
}
_TABLES = (".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xlsx", ".xls", ".sqlite", ".db")
_LINES = (".jsonl", ".ndjson")
# Beside texts these are settings, not documents.
_SETTINGS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".properties")
_SUFFIXES = {suffix: kind for kind, suffixes in _FORMATS.items() for suffix in suffixes}
# Tests, and a table of pydoc's that no one wrote.
_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "pydoc_data"})


@dataclass(frozen=True, slots=True)
class Located:
    """A source whose files are known. `name` is how messages call it; `files` is empty for a hub name; `huge` are texts
    that are not among `files` for their size; `others` is a line about the other files that are not, and `texts` the suffix
    of texts among them, beside rows. `typed`: where the source stands in the run's settings."""

    source: Source
    format: str
    name: str
    files: tuple[str, ...]
    huge: tuple[str, ...] = ()
    others: str = ""
    typed: Typed = field(default_factory=Typed)
    texts: str = ""

    @property
    def advice(self) -> str:
        """Return the advice to choose a folder's files by `include`, to follow other advice; empty for a single file."""
        if len(self.files) < 2 and not self.texts:
            return ""
        files = f"*{self.texts}" if self.texts else f"part-*{PurePath(self.files[0]).suffix}"
        chosen = f'{self.typed.key("include")}=["{files}"]'
        return f", or choose the files to read, such as {shlex.quote(chosen)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each kind of files that are not read; none where all are."""
        return tuple(line for line in (self._huge_note(), self.others) if line)

    def _huge_note(self) -> str:
        if not self.huge:
            return ""
        more = f" and {len(self.huge) - 1:,} more" if len(self.huge) > 1 else ""
        return (
            f"left out of {self.name} for being over {HUGE >> 20} MiB: {self.huge[0]}{more}; to train on such files name "
            "them as sources of their own"
        )

    def fingerprint(self) -> str:
        """Changes when a file comes, goes, or is written to; a hub name stands for itself."""
        try:
            facts = [(file, (stat := os.stat(file)).st_size, stat.st_mtime_ns) for file in self.files]
        except OSError as error:
            raise DataError(f"{error.filename} was there a moment ago and is gone ({error.strerror})") from None
        text = repr((self.format, self.source.model_dump_json(), facts))
        return hashlib.sha256(text.encode()).hexdigest()


def locate(source: Source, typed: Typed | None = None) -> Located:
    """The files of a source, sorted; DataError where there is nothing. `typed`: where it stands in the run's settings."""
    typed = typed or Typed()
    return replace(_locate(source, typed), typed=typed)


def _locate(source: Source, typed: Typed) -> Located:
    if source.path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return Located(source, "code", STDLIB, _some(_stdlib(root), source, typed, f"no .py files under {root}"))
    given = os.path.expanduser(source.path)
    if os.path.isdir(given):
        kind = _folder_format(given, source, typed) if source.format in ("auto", "hub") else source.format
        return _folder(given, kind, source, typed)
    if os.path.isfile(given):
        return Located(source, _file_format(given, source, typed), source.path, (given,))
    if glob.has_magic(given):
        files = sorted(file for file in glob.glob(given, recursive=True) if os.path.isfile(file))
        found = _some(files, source, typed, f"no file matches {source.path!r}")
        return Located(source, _one_format(found, source, typed), source.path, found)
    if source.format == "hub" or (source.format == "auto" and _may_be_hub(source.path)):
        return Located(source, "hub", source.path, ())
    raise DataError(
        f"{source.path!r} is no file or folder here (the working folder is {Path.cwd()}): type {typed.path()}"
        f"{near_paths(Path(given))}"
    )


def format_of(folder: str, source: Source, typed: Typed) -> str:
    """The format of a folder as it is now; empty where its files do not say."""
    try:
        return _folder_format(folder, source, typed)
    except DataError:
        return ""


def lets_through(source: Source, file: str) -> bool:
    """True if `include` names the file, or there is none."""
    return any(_included([file], source))


def reads_suffix(kind: str, file: str) -> bool:
    """True if a folder of this format may give a file of this name, text for all else that is known of it."""
    suffix = suffix_of(file)
    others = (*_SETTINGS, *_FORMATS["jsonl"], *_FORMATS["parquet"], *_TABLES)
    return kind == "code" or (suffix not in others if kind == "text" else suffix in _FORMATS[kind])


def _may_be_hub(path: str) -> bool:
    """`owner/name` or `name`, without a suffix that only files have."""
    plain = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path) is not None
    return plain and suffix_of(path) not in (*_SUFFIXES, *_TABLES, ".py", ".zip", ".tar")


def _file_format(file: str, source: Source, typed: Typed) -> str:
    if source.format not in ("auto", "hub"):
        return source.format
    if suffix_of(file) in _TABLES:
        raise DataError(
            f"{file} is a table of a kind that is not read: write it as jsonl or parquet, or set "
            f"{typed.key('format')}=text to train on it as one document"
        )
    return _SUFFIXES.get(suffix_of(file), "text")


def _one_format(files: Sequence[str], source: Source, typed: Typed) -> str:
    kinds = {_file_format(file, source, typed) for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"{source.path!r} matches files of several formats ({', '.join(sorted(kinds))}): set "
            f"{typed.key('format')}, or give each format a source of its own"
        )
    return kinds.pop()


def _folder_format(folder: str, source: Source, typed: Typed) -> str:
    """Return the format of a folder: code for a repository, else by the names of the files that `include` lets through."""
    if _is_repository(folder):
        return "code"
    own = _likely_format(folder, _included(walk(folder, VENDORED), source), typed)
    if own == "code":
        return own
    # Folders of data may be called as built ones are; what was built beside texts does not make them code.
    every = _likely_format(folder, _included(walk(folder), source), typed)
    return own if every == "code" else every


def _is_repository(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, ".git"))


def _likely_format(folder: str, files: Iterable[str], typed: Typed) -> str:
    """By the files' names; several sorts of data at once are the user's to name."""
    suffixes = [suffix_of(file) for file in files]
    texts = sum(suffix in _FORMATS["text"] for suffix in suffixes)
    # A .json beside anything else is a setting; alone it is the data.
    lines = any(suffix in _LINES for suffix in suffixes) or set(suffixes) == {".json"}
    tables = ".parquet" in suffixes
    if lines and tables:
        raise DataError(
            f"{folder!r} holds jsonl and parquet files: set {typed.key('format')}, or name the files by a glob"
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


def _folder(folder: str, kind: str, source: Source, typed: Typed) -> Located:
    written = kind == "code" or _is_repository(folder)
    tally, huge = Tally(), []
    found = []
    # Who names the files to include knows of the others.
    files = [*_included(walk(folder, VENDORED if written else (), None if source.include else tally), source)]
    lines = kind == "jsonl" and any(suffix_of(file) in _LINES for file in files)
    for file in files:
        why = _why_not_read(folder, file, kind, source, beside_lines=lines)
        if not why:
            found.append(file)
        elif why == _TOO_LARGE:
            huge.append(file)
        else:
            tally.add(file, why)
    nothing = f"{source.path!r} has no {kind} files ({_described(kind)})"
    note = tally.describe(source.path)
    if not found:
        raise _none(source, typed, nothing + (f"; {note}" if note else ""))
    texts = tally.most(_FORMATS["text"]) if kind in ("jsonl", "parquet") else ""
    return Located(source, kind, source.path, tuple(found), tuple(huge), note, texts=texts)


_TOO_LARGE = "too large"


def _why_not_read(folder: str, file: str, kind: str, source: Source, *, beside_lines: bool) -> str:
    """The reason why a folder's file is no document of this format; empty for one that is."""
    if kind == "code":
        return _why_no_source(file)
    suffix = suffix_of(file)
    chosen = bool(source.include) and (source.format != "auto" or kind == "text" or suffix not in _SUFFIXES)
    if chosen or (suffix in _FORMATS[kind] and (source.include or suffix in _LINES or not beside_lines)):
        return ""
    if kind != "text":
        return f"beside {' and '.join(_LINES)}" if suffix in _FORMATS[kind] else f"not {kind}"
    if suffix in _SETTINGS:
        return "settings"
    if suffix in (*_FORMATS["jsonl"], *_FORMATS["parquet"], *_TABLES):
        return "rows of data: name them as a source of their own"
    return "vendored or built" if is_vendored(folder, file) else _why_no_source(file)


def _why_no_source(file: str) -> str:
    why = why_not_written(file)
    return why or (_TOO_LARGE if os.path.getsize(file) > HUGE else "")


def _described(kind: str) -> str:
    return f"text below {HUGE >> 20} MiB, not vendored" if kind == "code" else ", ".join(_FORMATS[kind])


def _some(files: Iterable[str], source: Source, typed: Typed, nothing: str) -> tuple[str, ...]:
    """Those that `include` lets through; a source of none is an error."""
    found = tuple(_included(files, source))
    if not found:
        raise _none(source, typed, nothing)
    return found


def _none(source: Source, typed: Typed, nothing: str) -> DataError:
    also = f" that include={source.include} lets through" if source.include else ""
    return DataError(f"{nothing}{also}: type {typed.path()}, or correct its format and include")


def _included(files: Iterable[str], source: Source) -> Iterator[str]:
    patterns = source.include
    return (file for file in files if not patterns or any(_matches(file, pattern) for pattern in patterns))


def _matches(file: str, pattern: str) -> bool:
    return fnmatch(PurePath(file).name, pattern) or fnmatch(file, pattern) or PurePath(file).match(pattern)


def _stdlib(root: Path) -> Iterator[str]:
    for file in walk(str(root), VENDORED):
        parts = PurePath(file).relative_to(root).parts
        if file.endswith(".py") and not _NOT_STDLIB & set(parts) and os.path.getsize(file):
            yield file
