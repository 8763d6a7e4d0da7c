"""A verb as it is typed, in this process: status, output and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ithaca.cli import main

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """`typed("plan", "--length", "1M")` is `ithaca plan --length 1M`."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ithaca", *words])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbs write where they stand, and read what was calibrated on this machine: here neither is anybody's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "140")
