"""The record of a test session: a part adds to the record of all, `failed` is what failed last, seconds order the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.record import SLOWEST, Recorder, longest_first


def session(file: Path, part: str, **outcomes: str) -> dict[str, object]:
    recorder = Recorder(file, part)
    recorder.outcomes = dict(outcomes)
    recorder.pytest_sessionfinish(int("failed" in outcomes.values()))
    record: dict[str, object] = json.loads(file.read_text())
    return record


def test_record_part_adds_to_that_of_all(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    first = session(file, "", a="passed", b="failed", c="failed")
    assert (first["passed_all"], first["failed"], first["tests"]) == (False, ["b", "c"], 3)
    second = session(file, "tests/b.py", b="passed", d="failed")
    assert (second["passed_all"], second["failed"], second["tests"]) == (False, ["c", "d"], 3)
    third = session(file, "-k c", c="passed", d="skipped")
    assert (third["passed_all"], third["failed"]) == (True, [])
    assert [later["asked"] for later in third["later"]] == ["tests/b.py", "-k c"]  # type: ignore[attr-defined]


def test_record_all_tests_begin_anew(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    session(file, "", a="failed")
    session(file, "tests/a.py", a="passed")
    assert "later" not in session(file, "", a="passed")


def test_record_seconds_are_added_by_file_and_the_slowest_named(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    recorder = Recorder(file)
    for number in range(SLOWEST + 1):
        for when in ("setup", "call"):
            test = f"tests/{'ab'[number % 2]}.py::test_{number}"
            report = pytest.TestReport(test, ("", 0, ""), {}, "passed", None, when, duration=number / 2)  # type: ignore[arg-type]
            recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish(0)
    record = json.loads(file.read_text())
    assert record["seconds_by_file"] == {"tests/a.py": 110.0, "tests/b.py": 100.0}
    assert list(record["slowest"].items())[:2] == [("tests/a.py::test_20", 20.0), ("tests/b.py::test_19", 19.0)]
    assert len(record["slowest"]) == SLOWEST


def test_files_recorded_longest_come_first(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"seconds_by_file": {"a": 1.0, "b": 9.0}}))
    assert longest_first(["a::x", "b::x", "c::x", "c::y", "c::z"], file) == ["b", "c", "a"]
    assert longest_first(["a::x", "b::x", "b::y"], tmp_path / "none.json") == ["b", "a"]
