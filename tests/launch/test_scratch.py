"""Temporary folders: gone with their command, or at the next one where it was killed; others' are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ithaca.launch.scratch import clear_left, scratch_folder

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
HOLDER = """
import time
from ithaca.launch.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def start(where: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env={**ENVIRONMENT, "TMPDIR": str(where)}
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folder_of_killed_command_is_removed_and_of_living_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    foreign = tmp_path / "ithaca-mine"
    foreign.mkdir()
    (killed, gone), (living, there) = start(tmp_path), start(tmp_path)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert gone.is_dir()
        with scratch_folder() as own:
            assert {path.name for path in tmp_path.iterdir()} == {there.name, Path(own).name, "ithaca-mine"}
            (there / "owner").write_text("another machine")
            clear_left(tmp_path)
            assert Path(own).is_dir()
    finally:
        living.kill()
        living.communicate()
    clear_left(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {there.name, "ithaca-mine"}
