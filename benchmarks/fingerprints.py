"""Fingerprints of source files: equal for code that does the same, however it is written down or wherever it stands.

    sources = on_disk(root, ["package/*"])        # {"package/part.py": "0f3a99c1b2d4", ...}
    earlier = at_commit(root, "1a2b3c4", ["package/*"])
    changed(earlier, sources)                      # [] or ["package/part.py", "package/gone.py (gone)"]

A Python file is known by its syntax tree without docstrings, comments, imports, `__all__` and formatting, so prose and a
changed import leave its fingerprint as it is; a file of nothing else has none. JSON is known by its value, another file by its
bytes. Two sets of files are compared as multisets of fingerprints, so a file that only moved has not changed. A
pattern is one of `fnmatch`, whose `*` goes into folders.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

DIGITS = 12
# Fields of syntax trees that say how a thing was written, or that some versions of Python alone have.
_WRITING = ("ctx", "kind", "type_comment", "type_ignores")


def fingerprint(path: str, content: bytes) -> str | None:
    """Return the fingerprint of one file, None where nothing in it runs."""
    if path.endswith(".py"):
        content = _code(content)
    elif path.endswith(".json"):
        content = json.dumps(json.loads(content), sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:DIGITS] if content else None


def _code(content: bytes) -> bytes:
    try:
        shape = _shape(ast.parse(content))
    except SyntaxError:
        # Of a newer Python, or half written: known by its bytes.
        return content
    return b"" if shape == ("Module",) else repr(shape).encode()


def _shape(node: Any) -> Any:
    """Return a syntax tree as nested tuples. `ast.unparse` and `ast.dump` differ between versions of Python, and figures
    are measured on one and judged on another: empty fields are left out, neighbouring texts in f-strings are joined."""
    if isinstance(node, ast.JoinedStr):
        return ("JoinedStr", *_joined(node.values))
    if isinstance(node, ast.AST):
        fields = ((name, _shape(value)) for name, value in ast.iter_fields(node) if name not in _WRITING)
        return (type(node).__name__, *((name, shape) for name, shape in fields if shape not in ("None", ())))
    if isinstance(node, list):
        return tuple(_shape(part) for part in node if not _is_silent(part))
    return repr(node)


def _joined(parts: list[ast.expr]) -> list[Any]:
    found: list[Any] = []
    for part in parts:
        text = part.value if isinstance(part, ast.Constant) else None
        if text is not None and found and isinstance(found[-1], str):
            found[-1] += str(text)
        elif text != "":
            found.append(_shape(part) if text is None else str(text))
    return found


def _is_silent(node: Any) -> bool:
    """True for imports, `__all__`, docstrings, `pass`, and a block under TYPE_CHECKING with nothing else in it."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return all(map(_is_silent, (*node.body, *node.orelse)))
    if isinstance(node, ast.Assign):
        return [each.id for each in node.targets if isinstance(each, ast.Name)] == ["__all__"]
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)


def on_disk(root: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Return path and fingerprint of the files below `root` that a pattern names; git is not needed."""
    folders = {pattern.split("/")[0] for pattern in patterns}
    files = (file for folder in sorted(folders) for file in (root / folder).rglob("*") if file.is_file())
    return _matching(((file.relative_to(root).as_posix(), file.read_bytes()) for file in files), patterns)


def at_commit(root: Path, commit: str, patterns: Iterable[str]) -> dict[str, str]:
    """Return the same of the files as they stood at a commit."""
    return _matching(_tree(root, commit).items(), patterns)


@lru_cache(maxsize=4)
def _tree(root: Path, commit: str) -> Mapping[str, bytes]:
    packed = subprocess.run(["git", "-C", str(root), "archive", commit], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return {member.name: opened.read() for member in tar if (opened := tar.extractfile(member))}


def _matching(files: Iterable[tuple[str, bytes]], patterns: Iterable[str]) -> dict[str, str]:
    chosen = ((path, content) for path, content in files if any(fnmatchcase(path, each) for each in patterns))
    found = {path: _cached(path, content) for path, content in chosen if not path.endswith(".pyc")}
    return {path: found[path] or "" for path in sorted(found) if found[path]}


# The subjects of a benchmark share most of their files.
_cached = lru_cache(maxsize=4096)(fingerprint)


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the paths of files that are new or changed, then those gone, each named as such."""
    came, gone = Counter(now.values()) - Counter(then.values()), Counter(then.values()) - Counter(now.values())
    found = [path if path in then else f"{path} (new)" for path, print_ in now.items() if came[print_]]
    return found + [f"{path} (gone)" for path, print_ in then.items() if gone[print_] and path not in now]
