"""The record of a test session: a part adds to the record of all, and `failed` is what failed when it last ran."""

from __future__ import annotations

import json
from pathlib import Path

from tests.record import Recorder


def session(file: Path, part: str, **outcomes: str) -> dict[str, object]:
    recorder = Recorder(file, part)
    recorder.outcomes = dict(outcomes)
    recorder.pytest_sessionfinish(int("failed" in outcomes.values()))
    record: dict[str, object] = json.loads(file.read_text())
    return record


def test_a_part_adds_to_the_record_of_all(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    first = session(file, "", a="passed", b="failed", c="failed")
    assert (first["passed_all"], first["failed"], first["tests"]) == (False, ["b", "c"], 3)
    second = session(file, "tests/b.py", b="passed", d="failed")
    assert (second["passed_all"], second["failed"], second["tests"]) == (False, ["c", "d"], 3)
    third = session(file, "-k c", c="passed", d="skipped")
    assert (third["passed_all"], third["failed"]) == (True, [])
    assert [later["asked"] for later in third["later"]] == ["tests/b.py", "-k c"]  # type: ignore[attr-defined]


def test_all_tests_begin_a_new_record(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    session(file, "", a="failed")
    session(file, "tests/a.py", a="passed")
    assert "later" not in session(file, "", a="passed")
