"""The table of subjects against the files and results that are there, and fingerprints across versions of Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import carried, stamps
from benchmarks.fingerprints import fingerprint, on_disk

FINGERPRINT = "fd441e8dc624"
PATTERNS = sorted({pattern for patterns in stamps.SUBJECTS.values() for pattern in patterns})
COMMITTED = sorted((stamps.ROOT / stamps.RESULTS).glob("*.json"))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_of_every_subject_names_code(pattern: str) -> None:
    assert on_disk(stamps.ROOT, [pattern])


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_committed_figures_have_names_of_their_own_and_stamps(file: Path) -> None:
    result = json.loads(file.read_text())
    names = [name for name, _, _ in stamps.figures_of(stamps.program_of(file), result)]
    assert len(names) == len(set(names)) > 0
    assert all(carried.latest(result, name) for name in names)


def test_parts_and_subjects_are_known() -> None:
    assert {subject for parts in stamps.PARTS.values() for subject in parts.values()} <= set(stamps.SUBJECTS)
    assert {stamps.program_of(file) for file in COMMITTED} <= set(stamps.PARTS)
    for program in stamps.PARTS:
        assert (stamps.ROOT / "benchmarks" / f"{program}.py").is_file()


def test_fingerprint_is_that_of_every_python() -> None:
    """Written down, since the interpreter that measures and the one that judges may be of different versions."""
    text = b'def f(x, *, y=None):\n    return f"a" "b{x!r:>{y}}" + "c" "d", {**x}\n'
    assert fingerprint("a.py", text) == FINGERPRINT
    assert fingerprint("a.py", b'"""Prose."""\nimport os\n') is None
    assert fingerprint("a.json", b'{"b": 1, "a": 2}') == fingerprint("b.json", b'{"a": 2,\n "b": 1}')
