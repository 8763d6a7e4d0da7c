"""Stamps on results: the commit and the source files on which each figure was measured.

    mark(result, "step", cell)      # a cell just measured; without a name, every part of the result

A result carries its stamps under "measured":

    "measured": {
     "sources": [{"commit": "1a2b3c4d5e6f", "subject": "step", "files": {"package/part.py": "0f3a99c1b2d4"}}],
     "figures": {"ithaca, 8B, 32768": {"sources": 0}}
    }

A figure is a part of the result ("rows", "overhead"), or one cell of a result that has cells. A figure whose stamp comes
from git's history, and not from the program, has "from_history". A figure that was carried over to other code has
"carried", with sources of its own and the comparison (`benchmarks.carried`). `python -m benchmarks.stale` reads all stamps.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fingerprints import at_commit, changed, on_disk

Result = dict[str, Any]
Stamp = dict[str, Any]
ROOT = Path(__file__).parent.parent
RESULTS = "benchmarks/results"

_KERNELS = ("ithaca/attention/kernels/*",)
_ATTENTION = ("ithaca/attention/*", "ithaca/heads.py", "ithaca/mesh.py", "ithaca/sequence/layout.py")
_LOSS = ("ithaca/memory/head_loss.py", "ithaca/memory/liger.py")
# The version of a cell of `benchmarks.versions` that is this tree's.
HERE = "here"
_STEP = (
    *_ATTENTION, "ithaca/memory/*", "ithaca/models/*", "ithaca/parallelize.py", "ithaca/planning/*", "ithaca/sequence/*",
    "ithaca/state/*", "ithaca/loss/causal.py",
)  # fmt: skip

# The source files that a figure measures, by subject. Tests hold every pattern to files that exist.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "kernels": _KERNELS,
    "attention": _ATTENTION,
    "loss": _LOSS,
    "attention and loss": (*_ATTENTION, *_LOSS),
    "experts": ("ithaca/planning/model/known_models.json",),
    "floor": ("benchmarks/floor.py", *_KERNELS),
    "peers": ("benchmarks/peers.py",),
    "step": _STEP,
    "run": (*_STEP, "ithaca/data/*", "ithaca/training/*"),
    "trainer": (*_STEP, "ithaca/integrations/*"),
    "rehearsal": (*_STEP, "ithaca/rehearse/*"),
    "prepare": ("ithaca/data/*", "ithaca/cli/prepare.py"),
}

# The subject of each part of a program's result; "cells SYSTEM" is that of the cells of one system.
PARTS: dict[str, dict[str, str]] = {
    "exact": {"cells": "attention and loss"},
    "experts": {"rows": "experts"},
    "guards": {"rows": "kernels"},
    "kernels": {"rows": "kernels", "speed": "kernels"},
    "longest": {"cells": "step", "heads": "loss"},
    "losses": {"rows": "loss", "specs": "loss"},
    "prepare": {"rows": "prepare"},
    "reach": {"cells": "step"},
    "rehearsals": {"cells": "rehearsal"},
    "step": {"cells": "peers", "cells ithaca": "step", "cells floor": "floor"},
    "trainer_peer": {"rounds": "trainer", "parity": "trainer"},
    "training": dict.fromkeys(
        ("overhead", "overhead_at_start", "overhead_on_a_slow_host", "run", "run_on_a_slow_host"), "run"
    ),
    "ulysses": {
        "pack": "attention", "overhead": "attention", "nccl": "step", "shared_2": "attention", "shared_4": "attention",
    },
    "versions": {"cells": "step"},
}  # fmt: skip
# Result files whose name is not their program's.
PROGRAMS = {"lengths": "step", "fa4": "step", "documents": "step"}

_IDENTITY = ("group", "system", "model", "sp", "length", "settings", "options", "version")
# Values that are computed from other values when a file is written, or that refer to another entry of the file.
_DERIVED = ("run", "predicted", "memory_error", "time_error", "planned_so_today", "step_s", "utilisation", "flops")


def name_of(cell: Result) -> str:
    """Return a cell's name, its settings in the order of `_IDENTITY`: "ithaca, 8B, 32768, budget_gib=40.0"."""
    found: list[str] = []
    for value in (cell[name] for name in _IDENTITY if name in cell):
        each = [f"{k}={v}" for k, v in sorted(value.items())] if isinstance(value, dict) else value
        found += map(str, each) if isinstance(each, list) else [str(each)]
    return ", ".join(found)


def save(file: Path, result: Result) -> None:
    """Write a result whole or not at all: a stop in the middle leaves the old file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(file)


def program_of(file: Path) -> str:
    return PROGRAMS.get(file.stem, file.stem)


def figures_of(program: str, result: Result) -> Iterator[tuple[str, str, Any]]:
    """Yield name, subject and value of every figure in a program's result; another version's are not of this code."""
    parts = PARTS[program]
    for cell in result.get("cells", []):
        if cell.get("version", HERE) == HERE:
            yield name_of(cell), parts.get(f"cells {cell.get('system')}", parts["cells"]), cell
    yield from ((part, parts[part], result[part]) for part in result if part in parts and part != "cells")


def mark(result: Result, program: str, figure: str | Result | None = None, root: Path = ROOT) -> None:
    """Stamp a figure with the source files on disk and their commit; None for all figures of the program."""
    chosen = name_of(figure) if isinstance(figure, dict) else figure
    for name, subject, _ in list(figures_of(program, result)):
        if chosen in (None, name):
            put(result, name, stamp_on_disk(root, subject))


def mark_like(result: Result, cell: Result, other: Result) -> None:
    """Copy the stamp of another cell, or its absence, to a cell that took its figures from there."""
    figures = result.get("measured", {}).get("figures", {})
    figures.pop(name_of(cell), None)
    if name_of(other) in figures:
        figures[name_of(cell)] = figures[name_of(other)]


def put(result: Result, name: str, stamp: Stamp, **more: Any) -> None:
    """Set the stamp of a figure; equal stamps are stored once, and stamps without a figure are removed."""
    old = result.get("measured", {"sources": [], "figures": {}})
    figures = {each: dict(entry) for each, entry in old["figures"].items()} | {name: {"sources": stamp} | more}
    known = old["sources"]
    sources: list[Stamp] = []
    for entry in figures.values():
        for holder in (entry, entry.get("carried", {})):
            if "sources" in holder:
                which = holder["sources"]
                holder["sources"] = _index_in(sources, known[which] if isinstance(which, int) else which)
    result["measured"] = {"sources": sources, "figures": figures}


def _index_in(sources: list[Stamp], stamp: Stamp) -> int:
    if stamp not in sources:
        sources.append(stamp)
    return sources.index(stamp)


def stamp_on_disk(root: Path, subject: str) -> Stamp:
    files = on_disk(root, SUBJECTS[subject])
    return {"commit": commit_of(root, subject, files), "subject": subject, "files": files}


def stamp_at(root: Path, commit: str, subject: str) -> Stamp:
    commit = short(root, commit)
    return {"commit": commit, "subject": subject, "files": at_commit(root, commit, SUBJECTS[subject])}


def commit_of(root: Path, subject: str, files: dict[str, str]) -> str | None:
    """Return HEAD, with a plus if the code on disk differs; None without git."""
    try:
        head = short(root, "HEAD")
        return head + ("+" if changed(at_commit(root, head, SUBJECTS[subject]), files) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def short(root: Path, commit: str) -> str:
    return git(root, "rev-parse", "--verify", "--quiet", "--short=12", f"{commit}^{{commit}}").strip()


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout


def versions(root: Path, file: Path) -> Iterator[tuple[str, Result]]:
    """Yield the commits that changed a result and the result as it was then, newest first."""
    path = file.resolve().relative_to(root.resolve()).as_posix()
    for commit in git(root, "log", "--format=%H", "--diff-filter=AM", "--", path).split():
        yield commit, json.loads(git(root, "show", f"{commit}:{path}"))


def came_at(root: Path, file: Path) -> dict[str, str]:
    """Return for each figure of a committed result the commit that brought its present value."""
    program = program_of(file)
    sought = {name: _measured(value) for name, _, value in figures_of(program, json.loads(file.read_text()))}
    found: dict[str, str] = {}
    for commit, then in versions(root, file):
        # By value alone, since a part may have had another name.
        values = [_measured(value) for name, value in then.items() if name != "cells"]
        values += [_measured(cell) for cell in then.get("cells", [])]
        sought = {name: value for name, value in sought.items() if value in values}
        found |= dict.fromkeys(sought, commit)
    return found


def _measured(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _measured(each) for name, each in value.items() if name not in _DERIVED}
    return [_measured(each) for each in value] if isinstance(value, list) else value
