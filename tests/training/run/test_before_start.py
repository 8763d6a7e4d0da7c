"""Checks of a run's folder before torch is imported: a refusal, an ended run, or nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ithaca.config.schema import RunSettings, read_run
from ithaca.errors import ConfigError
from ithaca.models.files.export_folder import mark_of, write_mark
from ithaca.state.checkpoint.manifest import name_of, seal
from ithaca.training.run.before_start import check_folder
from ithaca.training.run.progress import RunProgress
from ithaca.training.run.run_folder import RunFolder


def staged(root: Path, **more: Any) -> RunSettings:
    stage = {"length": 64, "steps": 5} | more.pop("stage", {})
    return read_run({"output": str(root), "stages": [stage], **more})


def held(run: RunSettings, progress: RunProgress) -> RunFolder:
    """Make a folder with a run's settings and one checkpoint, at `progress`."""
    folder = RunFolder(Path(run.output))
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    folder.write_settings(run)
    (part := folder.checkpoints / ".part").mkdir()
    facts = {"place": asdict(progress), "data": "", "fingerprint": "", "run": "this", "counts": [5] * progress.stage}
    seal(part, folder.checkpoints / name_of(progress.total), {}, facts, pin=False)
    return folder


def ended(run: RunSettings) -> RunFolder:
    folder = held(run, RunProgress(1, 0, 5))
    (target := folder.stage(0, 64)).mkdir(parents=True)
    write_mark(target, mark_of(folder.checkpoints / name_of(5)))
    folder.link_export(0, 64)
    return folder


def test_ended_run_says_nothing_is_left_to_do(tmp_path: Path) -> None:
    run = staged(tmp_path / "r")
    ended(run)
    said = check_folder(run)
    assert said is not None
    assert "ended after 5 steps, and nothing is left to do" in said
    assert "such as stages.0.steps=10, or set output=" in said
    assert check_folder(staged(tmp_path / "r", stage={"steps": 10})) is None
    other = staged(tmp_path / "t", stage={"steps": None, "tokens": 320})
    ended(other)
    assert "stages.0.tokens=640" in str(check_folder(other))


def test_unfinished_run_is_left_to_the_ranks(tmp_path: Path) -> None:
    assert check_folder(staged(tmp_path / "none")) is None
    run = staged(tmp_path / "half")
    held(run, RunProgress(0, 3, 3))
    assert check_folder(run) is None
    # The last stage's model is written by the next start.
    run = staged(tmp_path / "unwritten")
    held(run, RunProgress(1, 0, 5))
    assert check_folder(run) is None
    (tmp_path / "half" / "checkpoints" / name_of(3) / "facts.json").write_text("{")
    assert check_folder(run) is None


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    held(staged(tmp_path / "r"), RunProgress(0, 3, 3))
    for more in ({"stage": {"length": 128}}, {"seed": 4}, {"model": {"name": "other/model"}}):
        with pytest.raises(ConfigError, match="holds a run with other settings"):
            check_folder(staged(tmp_path / "r", **more))
    assert check_folder(staged(tmp_path / "r", stage={"lr": 1e-4, "steps": 9})) is None


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_file_as_output_is_refused(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"file is a file: set output="):
        check_folder(staged(tmp_path / output))


def test_check_imports_no_torch() -> None:
    code = (
        "import sys, ithaca.training.run.before_start, ithaca.data.sources.own_files; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
