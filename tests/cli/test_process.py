"""Tests of the allocator's setting: ours unless the user has set it, under any of its names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ithaca.cli.process import ALLOCATOR_VARIABLES, EXPANDABLE, use_expandable_segments

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_allocator_unset_gets_expandable_segments() -> None:
    use_expandable_segments()
    assert os.environ[ALLOCATOR_VARIABLES[0]] == EXPANDABLE


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_allocator_set_by_user_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    use_expandable_segments()
    assert [os.environ[each] for each in ALLOCATOR_VARIABLES if each in os.environ] == ["max_split_size_mb:128"]


def test_allocator_on_windows_stays_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    use_expandable_segments()
    assert not set(ALLOCATOR_VARIABLES) & os.environ.keys()


def test_allocator_setting_stands_in_one_file() -> None:
    files = [*(ROOT / "ithaca").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    written = [str(path.relative_to(ROOT)) for path in files if EXPANDABLE in path.read_text(encoding="utf-8")]
    assert written == ["ithaca/cli/process.py"]
