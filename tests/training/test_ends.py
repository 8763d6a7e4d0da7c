"""The end of a run: where its model is; and runs that would end with one that was never trained."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ithaca.cli.train import ending
from ithaca.config import Rope, read_run
from ithaca.errors import ConfigError
from ithaca.training.folder import RunFolder
from ithaca.training.place import Place
from ithaca.training.trainer import Outcome
from tests.training.runs import run_train, small_run


def test_adapters_on_random_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora needs model\.weights=pretrained"):
        read_run({"lora": {"rank": 4}, "model": {"weights": "random"}})


def test_llama3_frequencies_in_the_wrong_order_are_refused() -> None:
    for low, high in ((4, 1), (2, 2), (0, 4)):
        with pytest.raises(ValueError, match="below high_freq_factor"):
            Rope(kind="llama3", factor=8, low_freq_factor=low, high_freq_factor=high)


def test_what_to_type_next_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [{"length": 64, "steps": 1, "batch": 2}]
    assert run_train(1, small_run(tmp_path, "my ship's run", stages=stages))["finished"]
    folder = RunFolder(tmp_path / "my ship's run")
    last = ending(Outcome(folder.root, Place(1, 0), True), 1.0).splitlines()[-1]
    assert shlex.split(last)[:4] == ["ithaca", "train", str(folder.settings), "output=runs/mine"]
    # From a run that was called so itself another folder is proposed: this one would refuse another model.
    (tmp_path / "runs").mkdir()
    folder.root.rename(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert " output=runs/mine-2 " in ending(Outcome(Path("runs/mine"), Place(1, 0), True), 1.0)


def test_a_folder_in_the_way_of_export_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "run" / "export" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    stages = [{"length": 64, "steps": 2, "batch": 2}]
    assert run_train(1, small_run(tmp_path, "run", stages=stages))["finished"]
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]
    folder = RunFolder(tmp_path / "run")
    assert folder.model(1) == folder.stage(0, 64)
    assert f"{folder.stage(0, 64)}  (loads in plain transformers)" in ending(
        Outcome(folder.root, Place(1, 0), True), 1.0
    )
    AutoModelForCausalLM.from_pretrained(folder.model(1))
    mine.unlink()
    mine.parent.rmdir()
    folder.name_last(0, 64)
    assert folder.model(1) == folder.export
