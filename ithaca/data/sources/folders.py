"""Files of a folder in sorted order, and counts of the skipped files by suffix and reason.

Every folder: hidden files, links to folders, broken links and unreadable files are skipped. Repositories and folders of
source code: vendored and built folders, generated files and files that are no UTF-8 text are skipped too.

Invariant: every file below the folder is yielded or counted; a hidden, linked or vendored folder counts as one.
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
_GENERATED = ("*.min.js", "*.min.css", "*.map", "*.lock", "package-lock.json", "pnpm-lock.yaml", "*.ipynb", "*.svg")
_HEAD = 8192
# Suffixes that a line names before it says "of other kinds".
_NAMED_KINDS = 12


@dataclass(slots=True)
class SkippedFiles:
    """Counts of skipped files and folders, by reason and suffix."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, path: str, reason: str, kind: str = "") -> None:
        """Count a file or a folder. `kind`: name to count under instead of the suffix."""
        self.counts[reason, kind or suffix_of(path) or "files without a suffix"] += 1

    def most(self, suffixes: Collection[str]) -> str:
        """Return the suffix, of these, that most skipped files have; empty if no file has one."""
        found = Counter[str]()
        for (_, kind), count in self.counts.items():
            if kind in suffixes:
                found[kind] += count
        return max(found, key=lambda kind: (found[kind], kind), default="")

    def describe(self, name: str) -> str:
        """Return one line with the counts; empty if nothing was skipped."""
        if not self.counts:
            return ""
        ranked = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        parts = [f"{count:,} {kind} ({reason})" for (reason, kind), count in ranked[:_NAMED_KINDS]]
        if len(ranked) > _NAMED_KINDS:
            parts.append(f"{sum(count for _, count in ranked[_NAMED_KINDS:]):,} of other kinds")
        return f"left out of {name}: {', '.join(parts)}"


def suffix_of(file: str) -> str:
    """Return the suffix in lower case; for a compressed file that of its content: `.jsonl` of `a.jsonl.gz`."""
    path = PurePath(file)
    return PurePath(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def walk(folder: str, without: Collection[str] = (), skipped: SkippedFiles | None = None) -> Iterator[str]:
    """Yield the plain files below a folder, sorted, without links to folders and folders named in `without`."""
    skipped = SkippedFiles() if skipped is None else skipped

    def unreadable(error: OSError) -> None:
        skipped.add(str(error.filename), "cannot be read", "folders")

    for root, folders, files in os.walk(folder, onerror=unreadable):
        kept = []
        for name in sorted(folders):
            reason = _reason_to_skip_folder(os.path.join(root, name), name, without)
            if reason:
                skipped.add(name, reason, "folders")
            else:
                kept.append(name)
        # os.walk goes down into the folders that are left in this list, in its order.
        folders[:] = kept
        for name in sorted(files):
            path = os.path.join(root, name)
            reason = _reason_to_skip_file(path, name)
            if reason:
                skipped.add(name, reason)
            else:
                yield path


def _reason_to_skip_folder(path: str, name: str, without: Collection[str]) -> str:
    if name.startswith("."):
        return "hidden"
    if name.lower() in without:
        return "vendored or built"
    return "links, not followed" if os.path.islink(path) else ""


def _reason_to_skip_file(path: str, name: str) -> str:
    if name.startswith("."):
        return "hidden"
    if not os.path.isfile(path):
        return "broken links" if os.path.islink(path) else "no plain files"
    try:
        # A name that is not UTF-8 comes with surrogates, which no UTF-8 file can hold.
        name.encode()
    except UnicodeEncodeError:
        return "names that are not UTF-8"
    return ""


def is_vendored(folder: str, file: str) -> bool:
    """True if a folder between `folder` and the file has the name of a vendored or built folder."""
    return any(part.lower() in VENDORED for part in PurePath(file).relative_to(folder).parts[:-1])


def reason_not_handwritten(file: str) -> str:
    """Return the reason why a file is no handwritten text; empty for UTF-8 text without NUL that no tool generates."""
    try:
        if not os.path.getsize(file):
            return "empty"
        if any(fnmatch(os.path.basename(file), name) for name in _GENERATED):
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
        # A letter that the end of the first block cuts in two is no error.
        return "" if len(head) == _HEAD and error.start >= _HEAD - 3 else "no UTF-8 text"
    return ""
