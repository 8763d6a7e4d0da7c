"""Files that an earlier version wrote (`make.py` made them), laid out in a folder of the test's own."""

from __future__ import annotations

import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from ithaca.cli import main
from tests.compat.held import FILES, Typed
from tests.compat.make import put_places


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of the archives; their times, which caches are named after, are those of then."""
    folder = tmp_path_factory.mktemp("earlier")
    for archive in ("work", "trainer"):
        with tarfile.open(FILES / f"{archive}.tar.xz") as opened:
            opened.extractall(folder, filter="data")
    return folder


@pytest.fixture
def work(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of then, which the test may write to, as the current one."""
    folder = tmp_path / "work"
    shutil.copytree(unpacked, folder)
    put_places(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home"))
    monkeypatch.setenv("COLUMNS", "140")
    return folder


@pytest.fixture
def typed(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """`typed("plan --length 1M")` is `ithaca plan --length 1M` in the working folder: status, output and errors."""

    def call(words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ithaca", *words.split()])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return call
