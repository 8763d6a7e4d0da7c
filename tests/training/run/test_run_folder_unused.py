"""Removal of what a refused start has made."""

from pathlib import Path

import pytest

from ithaca.errors import ConfigError
from ithaca.training.run.run_folder import RunFolder


def test_refused_start_leaves_no_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    made = folder.missing()
    with folder.lock():
        folder.checkpoints.mkdir()
        folder.remove_unused(made)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kept", ["data", "run.yaml"])
def test_refused_start_with_files_keeps_folder(tmp_path: Path, kept: str) -> None:
    folder = RunFolder(tmp_path / "one")
    made = folder.missing()
    with folder.lock():
        (folder.root / kept).touch()
        folder.remove_unused(made)
    assert {path.name for path in folder.root.iterdir()} == {kept, "lock"}


def test_refused_start_in_users_folder_keeps_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    made = folder.missing()
    with folder.lock():
        folder.remove_unused(made)
    assert not any(tmp_path.iterdir())


def test_folder_locked_twice_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "one")
    with folder.lock(), pytest.raises(ConfigError, match="in use by another run"):
        folder.lock()
