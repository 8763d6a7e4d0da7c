"""Writes the outcome of a test session as JSON: versions, counts, seconds in all, by file and of the slowest tests.

`pytest --record FILE` switches it on (see conftest.py); `make test-all` keeps its result in the repository. A session
over part of the tests (`make test-all TESTS=...`) does not replace that of all of them: it is added under "later", and
`failed` is what failed when it last ran.

The seconds order the files of the next session (`longest_first`). The file says nothing about where the tests ran beyond
the platform, so that it compares between machines.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

SLOWEST = 20
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "safetensors", "peft", "trl", "torchao", "pytest")


class Recorder:
    """A pytest plugin that counts outcomes, one a test, and writes them when the session ends.

    `part`: what was asked for, where that is not all tests.
    """

    def __init__(self, file: Path, part: str = "") -> None:
        self.file, self.part = file, part
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.started = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Set-up and tear-down speak only when they do not pass, and then they decide.
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = outcome(report)
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        found = self.summary(int(exitstatus))
        if self.part and self.file.exists():
            found = self.added(json.loads(self.file.read_text()), found)
        self.file.write_text(json.dumps(found, indent=2) + "\n")

    def added(self, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        """The record of all tests with this session's after it."""
        left = [test for test in before["failed"] if test not in self.outcomes]
        later = {name: now[name] for name in ("date", "commit", "seconds", "tests", "counts", "failed")}
        failed = sorted({*left, *now["failed"]})
        sessions = [*before.get("later", []), {"asked": self.part} | later]
        return before | {"passed_all": not failed, "failed": failed, "later": sessions}

    def by_file(self) -> Counter[str]:
        """Return the seconds of every file: the sum over its tests, whichever process ran them."""
        found: Counter[str] = Counter()
        for test, seconds in self.seconds.items():
            found[file_of(test)] += seconds
        return found

    def summary(self, exitstatus: int) -> dict[str, Any]:
        failed = [test for test, how in self.outcomes.items() if how in ("failed", "error")]
        return {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            "passed_all": exitstatus == 0,
            "seconds": round(time.monotonic() - self.started, 1),
            "tests": len(self.outcomes),
            "counts": dict(sorted(Counter(self.outcomes.values()).items())),
            "failed": sorted(failed),
            "seconds_by_file": rounded(self.by_file().most_common()),
            "slowest": rounded(self.seconds.most_common(SLOWEST)),
            "platform": f"{platform.system()} {platform.machine()}",
            "versions": {"python": platform.python_version()} | versions(),
        }


def file_of(test: str) -> str:
    return test.partition("::")[0]


def rounded(seconds: list[tuple[str, float]]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in seconds}


def longest_first(tests: list[str], record: Path) -> list[str]:
    """Return the files of `tests`, those first that took longest when all tests were recorded.

    Processes that take whole files from a queue end at about the same time where the long files come first. A file
    that the record does not have counts a second a test.
    """
    known = json.loads(record.read_text()).get("seconds_by_file", {}) if record.exists() else {}
    counts = Counter(map(file_of, tests))
    return sorted(counts, key=lambda file: known.get(file, counts[file]), reverse=True)


def commit() -> str:
    """The checkout's, marked where files were changed since; empty where it is none."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def outcome(report: pytest.TestReport) -> str:
    """The word pytest itself would use in its last line."""
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if report.failed and report.when != "call":
        return "error"
    return report.outcome


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
