"""The end of a run: where its model is; and runs that would end with one that was never trained."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ithaca.cli import app
from ithaca.cli.train import ending, split_words
from ithaca.config import Rope, Run, dump_run, load_run, read_run
from ithaca.errors import ConfigError
from ithaca.models.pretrained import read_config
from ithaca.training.folder import RunFolder
from ithaca.training.place import Place
from ithaca.training.stages import advise_between
from ithaca.training.trainer import Outcome
from ithaca.training.unusual import advise_settings
from tests.training.runs import run_train, small_run, tiny_model


def test_adapters_on_random_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora needs model\.weights=pretrained"):
        read_run({"lora": {"rank": 4}, "model": {"weights": "random"}})


def test_llama3_frequencies_in_the_wrong_order_are_refused() -> None:
    for low, high in ((4, 1), (2, 2), (0, 4)):
        with pytest.raises(ValueError, match="below high_freq_factor"):
            Rope(kind="llama3", factor=8, low_freq_factor=low, high_freq_factor=high)


def finished(folder: Path, run: Run) -> str:
    """What is said at the end of a run, which need not have been taken."""
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "stages" / "1-64").mkdir(parents=True)
    (folder / "run.yaml").write_text(dump_run(run))
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "step", "at": 0.0, "step": 1, "loss": 2.0}) + "\n")
    return ending(Outcome(folder, Place(1, 0), True), 1.0)


@pytest.mark.parametrize("card", [None, "NVIDIA H200"])
def test_what_to_type_next_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str | None) -> None:
    """After the embedded run: commands whose rate, steps and positions are not its own."""
    monkeypatch.chdir(tmp_path)
    if card is not None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: card)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    said = finished(tmp_path / "run", Run())
    lines = [line for line in said.partition("next: ")[2].splitlines() if line.startswith("  ithaca ")]
    tiny_model(tmp_path / "model", max_position_embeddings=16_384)
    commands = [
        shlex.split(line.replace("MODEL_FOLDER", "model").replace("DOCUMENTS_FOLDER", "texts")) for line in lines
    ]
    for words in commands[:-1]:
        assert CliRunner().invoke(app, words[1:], catch_exceptions=False).exit_code == 0
    assert commands[-1][:2] == ["ithaca", "train"]
    run = load_run(*split_words(commands[-1][2:]))
    assert (run.model.name, run.data.sources[0].path) == ("model", "texts")
    [stage], embedded = run.stages, Run().stages
    assert stage.lr == 1e-5
    assert stage.steps not in {one.steps for one in embedded}
    # 16,384 positions are stretched where the plan was asked for more, by no more than that takes.
    assert stage.rope == (None if card is None else Rope(kind="yarn", factor=2, original=16_384))
    text = read_config(tmp_path / "model")
    assert not advise_settings(text, run.stages, adapters=False)
    assert not advise_between(16_384, run.stages)
    assert run.launch.processes == ("auto" if card is None else 4)


def test_nothing_is_proposed_after_a_run_of_ones_own(tmp_path: Path) -> None:
    said = finished(tmp_path / "run", small_run(tmp_path, "run-2"))
    assert "next:" not in said
    assert "MODEL_FOLDER" not in said


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
