"""Writes the outcome of a test session as JSON: versions, counts, seconds, date.

`pytest --record FILE` switches it on (see conftest.py); `make test-all` keeps its result in the repository.
The file says nothing about where the tests ran beyond the platform, so that it compares between machines.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "safetensors", "peft", "trl", "torchao", "pytest")


class Recorder:
    """A pytest plugin that counts outcomes, one a test, and writes them when the session ends."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcomes: dict[str, str] = {}
        self.started = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Set-up and tear-down speak only when they do not pass, and then they decide.
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = outcome(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.summary(int(exitstatus)), indent=2) + "\n")

    def summary(self, exitstatus: int) -> dict[str, Any]:
        failed = [test for test, how in self.outcomes.items() if how in ("failed", "error")]
        return {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "passed_all": exitstatus == 0,
            "seconds": round(time.monotonic() - self.started, 1),
            "tests": len(self.outcomes),
            "counts": dict(sorted(Counter(self.outcomes.values()).items())),
            "failed": sorted(failed),
            "platform": f"{platform.system()} {platform.machine()}",
            "versions": {"python": platform.python_version()} | versions(),
        }


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
