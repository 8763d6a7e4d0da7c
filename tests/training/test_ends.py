"""The end of a run: its model, its last lines, and the refusal of a model that was never trained."""

from __future__ import annotations

import errno
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ithaca.cli import app
from ithaca.cli.run_words import split_words
from ithaca.cli.train import describe_end
from ithaca.config.schema import RopeSettings, RunSettings, dump_run, load_run, read_run
from ithaca.errors import ConfigError, UntrainedError
from ithaca.models.files.pretrained import read_config
from ithaca.training.run.progress import RunProgress
from ithaca.training.run.run_folder import RunFolder
from ithaca.training.schedule import advise_between
from ithaca.training.trainer import RunResult, train
from ithaca.training.unusual_settings import advise_settings
from tests.ranks import RankError, expect_refusal, run_ranks
from tests.training.runs import export_sum, metrics, run_train, small_run, tiny_model


def test_adapters_on_random_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora needs model\.weights=pretrained"):
        read_run({"lora": {"rank": 4}, "model": {"weights": "random"}})


def test_llama3_frequencies_in_wrong_order_are_refused() -> None:
    for low, high in ((4, 1), (2, 2), (0, 4)):
        with pytest.raises(ValueError, match="below high_freq_factor"):
            RopeSettings(kind="llama3", factor=8, low_freq_factor=low, high_freq_factor=high)


def finished(folder: Path, run: RunSettings) -> str:
    """Return the last lines of a run, without running it."""
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "stages" / "1-64").mkdir(parents=True)
    (folder / "run.yaml").write_text(dump_run(run))
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "step", "at": 0.0, "step": 1, "loss": 2.0}) + "\n")
    return describe_end(RunResult(folder, RunProgress(1, 0), True), 1.0)


@pytest.mark.parametrize("card", [None, "NVIDIA H200"])
def test_commands_proposed_after_embedded_run_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str | None
) -> None:
    """After the embedded run: commands whose rate, steps and positions are not its own."""
    monkeypatch.chdir(tmp_path)
    if card is not None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: card)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    said = finished(tmp_path / "run", RunSettings())
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
    [stage], embedded = run.stages, RunSettings().stages
    assert stage.lr == 1e-5
    assert stage.steps not in {one.steps for one in embedded}
    # 16,384 positions are stretched where the plan was asked for more, by no more than that takes.
    assert stage.rope == (None if card is None else RopeSettings(kind="yarn", factor=2, original=16_384))
    text = read_config(tmp_path / "model")
    assert not advise_settings(text, run.stages, adapters=False)
    assert not advise_between(16_384, run.stages)
    assert run.launch.processes == ("auto" if card is None else 4)


def test_own_run_ends_without_proposed_commands(tmp_path: Path) -> None:
    said = finished(tmp_path / "run", small_run(tmp_path, "run-2"))
    assert "next:" not in said
    assert "MODEL_FOLDER" not in said


def test_missing_metrics_file_ends_run_well(tmp_path: Path) -> None:
    finished(tmp_path / "run", RunSettings())
    (tmp_path / "run" / "metrics.jsonl").unlink()
    told = describe_end(RunResult(tmp_path / "run", RunProgress(1, 0), True), 1.0)
    assert f"the losses of its steps are not in {tmp_path / 'run' / 'metrics.jsonl'}; this start" in told
    assert not [line for line in told.splitlines() if line.startswith(("  metrics ", "  loss "))]


def test_foreign_export_folder_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "run" / "export" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    stages = [{"length": 64, "steps": 2, "batch": 2}]
    assert run_train(1, small_run(tmp_path, "run", stages=stages))["finished"]
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]
    folder = RunFolder(tmp_path / "run")
    assert folder.model(1) == folder.stage(0, 64)
    assert f"{folder.stage(0, 64)}  (loads in plain transformers)" in describe_end(
        RunResult(folder.root, RunProgress(1, 0), True), 1.0
    )
    AutoModelForCausalLM.from_pretrained(folder.model(1))
    mine.unlink()
    mine.parent.rmdir()
    folder.link_export(0, 64)
    assert folder.model(1) == folder.export


def with_losses_times(text: str, factor: float) -> dict[str, Any]:
    """A run whose losses are multiplied by `factor`."""
    from ithaca.training import loop
    from tests.training.runs import _train

    real = loop.micro_loss
    try:
        loop.micro_loss = lambda *given, **named: real(*given, **named) * factor
        return _train(text)
    finally:
        loop.micro_loss = real


def test_run_of_bad_steps_alone_ends_without_model(tmp_path: Path) -> None:
    """Start both a run of bad steps and a good run twice."""
    stages = [{"length": 64, "steps": 4, "batch": 1}]
    run = small_run(tmp_path, "run", stages=stages, checkpoints={"save_every": 3})
    for _ in range(2):
        expect_refusal(
            2,
            with_losses_times,
            run.model_dump_json(),
            float("nan"),
            error="UntrainedError",
            match=r"stage 1 is over and none of its 4 steps was taken \(4 had .*no model is written",
        )
        assert not (Path(run.output) / "export").exists()
        assert not (Path(run.output) / "stages").exists()
    assert UntrainedError.status == 65
    good = small_run(tmp_path, "good", stages=stages)
    for _ in range(2):
        assert run_train(1, good)["finished"]


def test_bad_step_in_backward_ends_run_at_once(tmp_path: Path) -> None:
    """End the run, since its weights are NaN from then on."""
    more: Any = {"optimizer": {"in_backward": True, "clip": 0}, "checkpoints": {"save_every": 1}}
    run = small_run(tmp_path, "run", stages=[{"length": 64, "steps": 4, "batch": 1}], **more)
    expect_refusal(
        2,
        with_losses_times,
        run.model_dump_json(),
        float("nan"),
        error="BadStepsError",
        match=r"step 1: loss nan.*in_backward had stepped with it.*optimizer\.in_backward=false",
    )
    assert not list((Path(run.output) / "checkpoints").glob("step-*"))


def test_one_good_step_after_bad_steps_finishes_run(tmp_path: Path) -> None:
    """Take the good step before a stop, and after a stop."""
    for stop in (None, 3):
        run = small_run(
            tmp_path, f"run {stop}", stages=[{"length": 64, "steps": 6, "batch": 1}], limits={"bad_steps": 9}
        )
        if stop:
            stopped = run_ranks(1, good_from, run.model_dump_json(), 5, stop)[0]
            assert not stopped["finished"]
        got = run_ranks(1, good_from, run.model_dump_json(), 5, None)[0]
        assert got["finished"]
        assert (got["progress"].bad, got["progress"].total) == (5, 6)


def good_from(text: str, first: int, stop: int | None) -> dict[str, Any]:
    """Train with a loss of NaN in the steps before `first` (from 0)."""
    from ithaca.training import loop
    from tests.training.runs import _train

    step, learn = [0], loop.StageLoop._learn

    def taking(self: Any, batches: Any, targets: int, loss: torch.Tensor) -> Any:
        norm = learn(self, batches, targets, loss.fill_(float("nan")) if step[0] < first else loss)
        return norm

    def noting(self: Any, progress: Any, spans: Any) -> Any:
        step[0] = progress.step
        return real(self, progress, spans)

    real = loop.StageLoop.launch
    try:
        loop.StageLoop._learn, loop.StageLoop.launch = taking, noting  # type: ignore[method-assign]
        return _train(text, stop=stop)
    finally:
        loop.StageLoop._learn, loop.StageLoop.launch = learn, real  # type: ignore[method-assign]


def test_finished_run_with_more_steps_goes_on(tmp_path: Path) -> None:
    """Compare, at a constant rate, with a run that was as long from the start."""
    stage = {"length": 64, "batch": 2, "lr": 3e-3, "schedule": "constant", "warmup": 2}
    short = small_run(tmp_path, "run", stages=[{**stage, "steps": 5}])
    assert run_train(1, short)["finished"]
    first = export_sum(short)
    longer = small_run(tmp_path, "run", stages=[{**stage, "steps": 9}])
    got = run_train(1, longer)
    assert got["finished"]
    assert [line["step"] for line in got["metrics"] if line["kind"] == "step"] == list(range(1, 10))
    assert any("stages.0.steps was 5, is 9; stage 1 goes on with the constant schedule" in said for said in got["said"])
    whole = small_run(tmp_path, "whole", stages=[{**stage, "steps": 9}])
    assert run_train(1, whole)["sum"] == got["sum"] != first
    assert run_train(1, longer)["sum"] == got["sum"]
    with pytest.raises(RankError, match=r"stages\.0 has taken 9 steps and 5 are asked for"):
        run_train(1, short)
    more = small_run(tmp_path, "run", stages=[{**stage, "steps": 9}, {**stage, "steps": 3}])
    assert run_train(1, more)["progress"].total == 12
    with pytest.raises(RankError, match=r"stages\.0 took 9 steps before stages\.1 began, and 11 are asked"):
        run_train(1, small_run(tmp_path, "run", stages=[{**stage, "steps": 11}, {**stage, "steps": 3}]))


def test_model_of_another_run_is_refused_before_first_step(tmp_path: Path) -> None:
    """Delete the checkpoints, after which another run would end with the old model."""
    stages = [{"length": 64, "steps": 2, "batch": 2}]
    run = small_run(tmp_path, "run", stages=stages)
    assert run_train(1, run)["finished"]
    root, before = Path(run.output), export_sum(run)
    shutil.rmtree(root / "checkpoints")
    other = small_run(tmp_path, "run", stages=stages, seed=4)
    with pytest.raises(RankError, match=r"1-64 holds what this run did not write, and the model of stage 1 goes there"):
        run_train(1, other)
    assert export_sum(run) == before
    shutil.rmtree(root / "stages")
    assert run_train(1, other)["finished"]
    assert export_sum(run) != before


def test_no_whole_checkpoint_is_refused_and_restarts_on_request(tmp_path: Path) -> None:
    stages = [{"length": 64, "steps": 4, "batch": 2}]
    run = small_run(tmp_path, "run", stages=stages, checkpoints={"save_every": 2})
    first = run_train(1, run)
    for path in (Path(run.output) / "checkpoints").iterdir():
        (path / "manifest.json").write_text("{")
    with pytest.raises(RankError, match=r"holds 2 checkpoints and none is whole.*--restart"):
        run_train(1, run)
    again = run_ranks(1, begun_anew, run.model_dump_json())[0]
    assert again == first["sum"]
    names = sorted(path.name for path in (Path(run.output) / "checkpoints").iterdir())
    assert names == ["corrupt-step-00000002", "corrupt-step-00000004", "step-00000002", "step-00000004"]
    assert [line["step"] for line in metrics(run) if line["kind"] == "step"] == [1, 2, 3, 4]


def begun_anew(text: str) -> str | None:
    run = RunSettings.model_validate_json(text)
    assert train(run, restart=True).finished
    return export_sum(run)


@pytest.mark.few(1)
@pytest.mark.parametrize("kept", [True, False])
def test_stop_on_full_disk_names_last_checkpoint(tmp_path: Path, kept: bool) -> None:
    run = small_run(tmp_path, "run", checkpoints={"save_every": 5 if kept else 50, "background": False})
    got = run_ranks(2, stopped_with_a_full_disk, run.model_dump_json())[0]
    assert not got["finished"]
    assert got["progress"].total == 7
    where = "step-00000005, the last whole checkpoint" if kept else "step 1, as no checkpoint is whole"
    assert re.fullmatch(
        rf"stopped after 7 steps, not saved \(.*No space left.*\): the same .* from {where}", got["said"][-1]
    )
    again = run_train(2, run)
    assert again["finished"]
    assert again["sum"] == run_train(2, small_run(tmp_path, "whole"))["sum"]


def stopped_with_a_full_disk(text: str) -> dict[str, Any]:
    from ithaca.state.checkpoint import checkpoints
    from tests.training.runs import _train

    real = checkpoints.write_tensors

    def write(folder: Path, tensors: Any, group: Any) -> Any:
        if "00000007" in folder.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, tensors, group)

    try:
        checkpoints.write_tensors = write
        return _train(text, stop=7, at="forward layer 1")
    finally:
        checkpoints.write_tensors = real


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "checkpoint",
            r"stopped after 12 steps: the checkpoint of step 12 was not .*space.*; the .* from step-00000010, .*",
        ),
        (
            "model",
            r"stopped after 12 steps: .*1-64 was not written \(.*space.*; the same .* goes on from step-00000012, .*",
        ),
        ("name", r"stopped after 12 steps: .*No space left.*; the same command goes on from step-00000012, .*"),
    ],
)
def test_stop_while_stage_end_is_unwritten_is_a_stop(tmp_path: Path, what: str, said: str) -> None:
    """Ask one rank to stop a moment before the write fails; the same command then finishes the run."""
    run = small_run(tmp_path, "run")
    with pytest.raises(RankError, match="No space left on device"):
        run_ranks(2, with_no_room_at_the_end, run.model_dump_json(), what, False)
    for left in (Path(run.output) / "checkpoints").glob("step-00000012"):
        shutil.rmtree(left)
    got = run_ranks(2, with_no_room_at_the_end, run.model_dump_json(), what, True)[0]
    assert not got["finished"]
    assert re.fullmatch(said, got["said"][-1]), got["said"][-1]
    again = run_train(2, run)
    assert again["finished"]
    assert again["sum"] == run_train(2, small_run(tmp_path, "whole"))["sum"]


def with_no_room_at_the_end(text: str, what: str, stops: bool) -> dict[str, Any]:
    """Train until a write at the stage's end fails. `stops`: the second rank is asked to stop as the stage ends."""
    from ithaca.state.checkpoint import checkpoints
    from ithaca.training import saving
    from tests.training.runs import _train

    written, exported, named = checkpoints.write_tensors, saving.export_checkpoint, RunFolder.link_export
    ended = saving.RunSaver.end_stage

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write(folder: Path, tensors: Any, group: Any) -> Any:
        return full() if "00000012" in folder.name else written(folder, tensors, group)

    def ending(self: Any, session: Any, progress: RunProgress) -> RunProgress:
        if stops and self.context.mesh.rank == 1:
            self.context.watch.request_stop()
        return ended(self, session, progress)

    try:
        saving.RunSaver.end_stage = ending  # type: ignore[method-assign]
        if what == "checkpoint":
            checkpoints.write_tensors = write
        elif what == "model":
            saving.export_checkpoint = full  # type: ignore[assignment]
        else:
            RunFolder.link_export = full  # type: ignore[method-assign]
        return _train(text)
    finally:
        checkpoints.write_tensors, saving.export_checkpoint = written, exported
        RunFolder.link_export, saving.RunSaver.end_stage = named, ended  # type: ignore[method-assign]
