"""What a run's folder says of a start before torch is loaded: refused, ended, or nothing."""

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
from ithaca.training.run.before_start import look_ahead
from ithaca.training.run.progress import Place
from ithaca.training.run.run_folder import RunFolder


def staged(root: Path, **more: Any) -> RunSettings:
    stage = {"length": 64, "steps": 5} | more.pop("stage", {})
    return read_run({"output": str(root), "stages": [stage], **more})


def held(run: RunSettings, place: Place) -> RunFolder:
    """A folder with a run's settings and one checkpoint, at `place`."""
    folder = RunFolder(Path(run.output))
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    folder.leave_settings(run)
    (part := folder.checkpoints / ".part").mkdir()
    facts = {"place": asdict(place), "data": "", "fingerprint": "", "run": "this", "counts": [5] * place.stage}
    seal(part, folder.checkpoints / name_of(place.total), {}, facts, pin=False)
    return folder


def ended(run: RunSettings) -> RunFolder:
    folder = held(run, Place(1, 0, 5))
    (target := folder.stage(0, 64)).mkdir(parents=True)
    write_mark(target, mark_of(folder.checkpoints / name_of(5)))
    folder.name_last(0, 64)
    return folder


def test_a_run_that_has_ended_has_nothing_left_to_do(tmp_path: Path) -> None:
    run = staged(tmp_path / "r")
    ended(run)
    said = look_ahead(run)
    assert said is not None
    assert "ended after 5 steps, and nothing is left to do" in said
    assert "such as stages.0.steps=10, or set output=" in said
    assert look_ahead(staged(tmp_path / "r", stage={"steps": 10})) is None
    other = staged(tmp_path / "t", stage={"steps": None, "tokens": 320})
    ended(other)
    assert "stages.0.tokens=640" in str(look_ahead(other))


def test_what_is_left_to_do_is_left_to_the_ranks(tmp_path: Path) -> None:
    assert look_ahead(staged(tmp_path / "none")) is None
    run = staged(tmp_path / "half")
    held(run, Place(0, 3, 3))
    assert look_ahead(run) is None
    # The last stage's model is written by the next start.
    run = staged(tmp_path / "unwritten")
    held(run, Place(1, 0, 5))
    assert look_ahead(run) is None
    (tmp_path / "half" / "checkpoints" / name_of(3) / "facts.json").write_text("{")
    assert look_ahead(run) is None


def test_another_run_is_refused(tmp_path: Path) -> None:
    held(staged(tmp_path / "r"), Place(0, 3, 3))
    for more in ({"stage": {"length": 128}}, {"seed": 4}, {"model": {"name": "other/model"}}):
        with pytest.raises(ConfigError, match="holds a run with other settings"):
            look_ahead(staged(tmp_path / "r", **more))
    assert look_ahead(staged(tmp_path / "r", stage={"lr": 1e-4, "steps": 9})) is None


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_a_file_is_no_folder_for_a_run(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"file is a file: set output="):
        look_ahead(staged(tmp_path / output))


def test_it_is_known_without_torch() -> None:
    code = (
        "import sys, ithaca.training.run.before_start, ithaca.data.sources.own_files; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
