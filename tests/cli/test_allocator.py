"""The allocator's setting: ours unless the user has one, under any of its names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ithaca.cli.allocator import GROWING, NAMES, let_segments_grow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_segments_grow_unless_told() -> None:
    let_segments_grow()
    assert os.environ[NAMES[0]] == GROWING


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    let_segments_grow()
    assert [os.environ.get(each) for each in NAMES if each in os.environ] == ["max_split_size_mb:128"]


def test_where_segments_cannot_grow_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    let_segments_grow()
    assert not set(NAMES) & os.environ.keys()


def test_the_benchmarks_take_the_same_setting() -> None:
    files = [*(ROOT / "ithaca").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    written = [str(path.relative_to(ROOT)) for path in files if GROWING in path.read_text(encoding="utf-8")]
    assert written == ["ithaca/cli/allocator.py"]
