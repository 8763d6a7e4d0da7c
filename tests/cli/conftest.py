"""A verb as it is typed, in this process: status, output and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable

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
