"""Files of a folder, in sorted order, and an account of those that are no documents: how many of each suffix, and why.

Hidden files, links to folders, broken links and what cannot be read are left out of every folder. A repository, and a
folder of sources, also leaves out vendored and built folders, what a tool wrote, and files that are no UTF-8 text.

Invariant: every file below the folder is either given or counted, a hidden, linked or vendored folder as one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import PurePath

HUGE = 1 << 20
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_PACKAGES = ("node_modules", "bower_components", "vendor", "vendored", "third_party", "site-packages", "dist-packages")
_BUILT = ("__pycache__", "venv", "env", "build", "dist", "target", "out", "coverage", "htmlcov")
VENDORED = frozenset((*_PACKAGES, *_BUILT))
_NOT_WRITTEN = ("*.min.js", "*.min.css", "*.map", "*.lock", "package-lock.json", "pnpm-lock.yaml", "*.ipynb", "*.svg")
_HEAD = 8192
_KINDS = 12


@dataclass(slots=True)
class Tally:
    """Files and folders that were left out, by reason and suffix."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, path: str, why: str, kind: str = "") -> None:
        self.counts[why, kind or suffix_of(path) or "files without a suffix"] += 1

    def most(self, suffixes: Collection[str]) -> str:
        """The one of these suffixes that most files have; empty where none has any."""
        found = Counter[str]()
        for (_, kind), count in self.counts.items():
            if kind in suffixes:
                found[kind] += count
        return max(found, key=lambda kind: (found[kind], kind), default="")

    def describe(self, name: str) -> str:
        """One line for a user; empty where nothing was left out."""
        if not self.counts:
            return ""
        ranked = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        parts = [f"{count:,} {kind} ({why})" for (why, kind), count in ranked[:_KINDS]]
        if len(ranked) > _KINDS:
            parts.append(f"{sum(count for _, count in ranked[_KINDS:]):,} of other kinds")
        return f"left out of {name}: {', '.join(parts)}"


def suffix_of(file: str) -> str:
    """The suffix in small letters, that of a compressed file's content: `.jsonl` of `a.jsonl.gz`."""
    path = PurePath(file)
    return PurePath(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def walk(folder: str, without: Collection[str] = (), tally: Tally | None = None) -> Iterator[str]:
    """Plain files that are not hidden and not in a folder called as in `without`, sorted; links to folders are not
    followed. What is passed over is counted in `tally`."""
    left = Tally() if tally is None else tally
    unreadable = lambda error: left.add(str(error.filename), "cannot be read", "folders")  # noqa: E731
    for root, folders, files in os.walk(folder, onerror=unreadable):
        kept = []
        for name in sorted(folders):
            why = _why_no_folder(os.path.join(root, name), name, without)
            if why:
                left.add(name, why, "folders")
            else:
                kept.append(name)
        folders[:] = kept
        for name in sorted(files):
            path = os.path.join(root, name)
            why = _why_no_file(path, name)
            if why:
                left.add(name, why)
            else:
                yield path


def _why_no_folder(path: str, name: str, without: Collection[str]) -> str:
    if name.startswith("."):
        return "hidden"
    if name.lower() in without:
        return "vendored or built"
    return "links, not followed" if os.path.islink(path) else ""


def _why_no_file(path: str, name: str) -> str:
    if name.startswith("."):
        return "hidden"
    if not os.path.isfile(path):
        return "broken links" if os.path.islink(path) else "no plain files"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "names that are not UTF-8"
    return ""


def is_vendored(folder: str, file: str) -> bool:
    """True if a folder between `folder` and the file is called as vendored and built ones are."""
    return any(part.lower() in VENDORED for part in PurePath(file).relative_to(folder).parts[:-1])


def why_not_written(file: str) -> str:
    """The reason why no person wrote this file; empty for UTF-8 text without NUL that is no lock file or minified
    script."""
    try:
        if not os.path.getsize(file):
            return "empty"
        if any(fnmatch(os.path.basename(file), name) for name in _NOT_WRITTEN):
            return "written by tools"
        with open(file, "rb") as opened:
            head = opened.read(_HEAD)
    except OSError:
        return "cannot be read"
    if not head.strip() and len(head) < _HEAD:
        return "empty"
    if b"\0" in head:
        return "no text"
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # A letter cut in two by the end of what was read is no fault.
        return "" if len(head) == _HEAD and error.start >= _HEAD - 3 else "no UTF-8 text"
    return ""
