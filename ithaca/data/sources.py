"""Which files a source is: a path, a glob, a folder, the standard library or a hub name, and how they are read.

`locate` finds the format out from what is there, walks folders in sorted order, and leaves out of a code repository
what nobody wrote by hand: version control, vendored and built folders, binary and huge files. Of other folders it
leaves out what is hidden, and nothing else.

Invariant: the same files in the same order on every machine that has the same content under the same path.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePath

from ithaca.config import Source
from ithaca.errors import DataError

STDLIB = "stdlib"
HUGE = 1 << 20
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_FORMATS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "text": (".txt", ".md", ".rst", ".text"),
}
_TABLES = (".csv", ".tsv")
_SUFFIXES = {suffix: kind for kind, suffixes in _FORMATS.items() for suffix in suffixes}
_PACKAGES = ("node_modules", "bower_components", "vendor", "vendored", "third_party", "site-packages", "dist-packages")
_BUILT = ("__pycache__", "venv", "env", "build", "dist", "target", "out", "coverage", "htmlcov")
_VENDORED = frozenset((*_PACKAGES, *_BUILT))
_NOT_WRITTEN = ("*.min.js", "*.min.css", "*.map", "*.lock", "package-lock.json", "pnpm-lock.yaml", "*.ipynb", "*.svg")
# Tests, and a table of pydoc's that no one wrote.
_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "pydoc_data"})
_HEAD = 8192


@dataclass(frozen=True, slots=True)
class Located:
    """A source whose files are known. `name` is how messages call it; `files` is empty for a hub name; `huge` are a
    repository's texts that are not among `files` for their size."""

    source: Source
    format: str
    name: str
    files: tuple[str, ...]
    huge: tuple[str, ...] = ()

    @property
    def left_out(self) -> str:
        """A note on the huge files; empty where there are none."""
        if not self.huge:
            return ""
        more = f" and {len(self.huge) - 1:,} more" if len(self.huge) > 1 else ""
        return (
            f"left out of {self.name} for being over {HUGE >> 20} MiB: {self.huge[0]}{more}; to train on such files name "
            "them as sources of their own"
        )

    def fingerprint(self) -> str:
        """Changes when a file comes, goes, or is written to; a hub name stands for itself."""
        facts = [(file, (stat := os.stat(file)).st_size, stat.st_mtime_ns) for file in self.files]
        text = repr((self.format, self.source.model_dump_json(), facts))
        return hashlib.sha256(text.encode()).hexdigest()


def locate(source: Source) -> Located:
    """The files of a source, sorted; DataError where there is nothing."""
    if source.path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return Located(source, "code", STDLIB, _some(_stdlib(root), source, f"no .py files under {root}"))
    given = os.path.expanduser(source.path)
    if os.path.isdir(given):
        kind = _folder_format(given) if source.format in ("auto", "hub") else source.format
        return _folder(given, kind, source)
    if os.path.isfile(given):
        return Located(source, _file_format(given, source), source.path, (given,))
    if glob.has_magic(given):
        files = sorted(file for file in glob.glob(given, recursive=True) if os.path.isfile(file))
        found = _some(files, source, f"no file matches {source.path!r}")
        return Located(source, _one_format(found, source), source.path, found)
    if source.format == "hub" or (source.format == "auto" and _may_be_hub(source.path)):
        return Located(source, "hub", source.path, ())
    raise DataError(
        f"{source.path!r} is no file or folder here (the working folder is {Path.cwd()}): correct data.sources.path"
    )


def _may_be_hub(path: str) -> bool:
    """`owner/name` or `name`, without a suffix that only files have."""
    plain = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path) is not None
    return plain and _suffix(path) not in (*_SUFFIXES, *_TABLES, ".py", ".zip", ".tar")


def _suffix(file: str) -> str:
    path = PurePath(file)
    return PurePath(path.stem).suffix.lower() if path.suffix.lower() in _COMPRESSED else path.suffix.lower()


def _file_format(file: str, source: Source) -> str:
    if source.format not in ("auto", "hub"):
        return source.format
    if _suffix(file) in _TABLES:
        raise DataError(
            f"{file} is a table of a kind that is not read: write it as jsonl or parquet, or set the source's format to "
            "text to train on it as one document"
        )
    return _SUFFIXES.get(_suffix(file), "text")


def _one_format(files: Sequence[str], source: Source) -> str:
    kinds = {_file_format(file, source) for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"{source.path!r} matches files of several formats ({', '.join(sorted(kinds))}): set the source's format, "
            "or give each format a source of its own"
        )
    return kinds.pop()


def _folder_format(folder: str) -> str:
    """A repository is code; else what the files' names say."""
    if _is_repository(folder):
        return "code"
    own = _likely_format(folder, _written_files(folder))
    if own == "code":
        return own
    # Folders of data may be called as built ones are; what was built beside texts does not make them code.
    every = _likely_format(folder, _walk(folder))
    return own if every == "code" else every


def _is_repository(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, ".git"))


def _likely_format(folder: str, files: Iterable[str]) -> str:
    """By the files' names; several sorts of data at once are the user's to name."""
    suffixes = [_suffix(file) for file in files]
    texts = sum(suffix in _FORMATS["text"] for suffix in suffixes)
    # A .json beside texts or sources is a setting; alone it is the data.
    lines = any(suffix in (".jsonl", ".ndjson") for suffix in suffixes) or set(suffixes) == {".json"}
    tables = ".parquet" in suffixes
    if lines and tables:
        raise DataError(
            f"{folder!r} holds jsonl and parquet files: set the source's format, or name the files by a glob"
        )
    if lines or tables:
        return "jsonl" if lines else "parquet"
    return "text" if 2 * texts >= len(suffixes) else "code"


def _folder(folder: str, kind: str, source: Source) -> Located:
    if kind == "code":
        written = [file for file in _written_files(folder) if _is_written(file)]
        small = (file for file in written if os.path.getsize(file) <= HUGE)
        huge = (file for file in written if os.path.getsize(file) > HUGE)
        files = _some(small, source, f"{source.path!r} has no source files (text below {HUGE >> 20} MiB, not vendored)")
        return Located(source, kind, source.path, files, tuple(_included(huge, source)))
    wanted = _FORMATS[kind]
    walked = _written_files(folder) if _is_repository(folder) else _walk(folder)
    found = (file for file in walked if source.include or _suffix(file) in wanted)
    nothing = f"{source.path!r} has no {kind} files ({', '.join(wanted)})"
    return Located(source, kind, source.path, _some(found, source, nothing))


def _some(files: Iterable[str], source: Source, nothing: str) -> tuple[str, ...]:
    """Those that `include` lets through; a source of none is an error."""
    found = tuple(_included(files, source))
    if not found:
        also = f" that include={source.include} lets through" if source.include else ""
        raise DataError(f"{nothing}{also}: correct data.sources (path, format, include)")
    return found


def _included(files: Iterable[str], source: Source) -> Iterator[str]:
    patterns = source.include
    return (file for file in files if not patterns or any(_matches(file, pattern) for pattern in patterns))


def _matches(file: str, pattern: str) -> bool:
    return fnmatch(PurePath(file).name, pattern) or fnmatch(file, pattern) or PurePath(file).match(pattern)


def _written_files(folder: str) -> Iterator[str]:
    """Those of a repository that are not in a vendored or built folder."""
    return _walk(folder, _VENDORED)


def _walk(folder: str, without: Collection[str] = ()) -> Iterator[str]:
    """Plain files that are not hidden and not in a folder called as in `without`, sorted; links to folders are not
    followed."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name.lower() not in without)
        for name in sorted(files):
            path = os.path.join(root, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield path


def _is_written(file: str) -> bool:
    """Text that a person may have written: no NUL, not empty, no lock file or minified script."""
    if not os.path.getsize(file) or any(fnmatch(os.path.basename(file), name) for name in _NOT_WRITTEN):
        return False
    try:
        with open(file, "rb") as opened:
            head = opened.read(_HEAD)
    except OSError:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # A letter cut in two by the end of what was read is no fault.
        return b"\0" not in head and len(head) == _HEAD and error.start >= _HEAD - 3
    return b"\0" not in head


def _stdlib(root: Path) -> Iterator[str]:
    for file in _written_files(str(root)):
        parts = PurePath(file).relative_to(root).parts
        if file.endswith(".py") and not _NOT_STDLIB & set(parts) and os.path.getsize(file):
            yield file
