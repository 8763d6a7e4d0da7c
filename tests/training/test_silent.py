"""Silent steps, in which no label is learned: not taken, printed once, and in no average."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.cli.train import describe_end
from ithaca.report.loss_picture import draw_loss
from ithaca.state.checkpoint.dcp import CheckpointTensors
from ithaca.training.run.progress import RunProgress
from ithaca.training.run.run_folder import RunFolder
from ithaca.training.trainer import RunResult
from tests.training.runs import run_train, small_run

LENGTH = 64


def half_silent(folder: Path) -> Path:
    """Write documents of a row each; every other document has labels of -100 alone."""
    file = folder / "half.jsonl"
    records = []
    for number in range(16):
        ids = [(number * 7 + at * 3) % 200 for at in range(LENGTH)]
        records.append({"input_ids": ids, "labels": [-100] * LENGTH if number % 2 else ids})
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def silent_run(folder: Path, name: str, **more: Any) -> Any:
    return small_run(
        folder,
        name,
        **{
            "data": {"sources": [str(half_silent(folder))], "cache": str(folder / "cache")},
            "stages": [{"length": LENGTH, "steps": 8, "batch": 1, "lr": 1e-2, "warmup": 1}],
            "optimizer": {"weight_decay": 0.1},
            "checkpoints": {"save_every": 1, "keep": 20},
            **more,
        },
    )


def state(root: Path, step: int) -> dict[str, torch.Tensor]:
    saved = CheckpointTensors(root / "checkpoints" / f"step-{step:08d}")
    return {key: saved.whole(key) for key in saved.tensors}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_silent_step_is_not_taken_and_has_no_loss(tmp_path: Path, world: int) -> None:
    run = silent_run(tmp_path, "run")
    got = run_train(world, run)
    steps = [line for line in got["metrics"] if line["kind"] == "step"]
    silent = [line["step"] for line in steps if line["targets"] == 0]
    assert 0 < len(silent) < 8
    for line in steps:
        assert (line["loss"] is None) == (line["gradient_norm"] is None) == (line["step"] in silent)
        assert (line["tokens_per_second"] is None) == (line["step"] in silent)
    assert (got["progress"].bad, got["progress"].silent, got["progress"].total) == (0, len(silent), 8)
    # Weights and moments are bit for bit as they were, decay and momentum or not; after the others they are not.
    for line in steps[1:]:
        before, after = (state(Path(run.output), at) for at in (line["step"] - 1, line["step"]))
        alike = [torch.equal(before[key], after[key]) for key in before]
        assert all(alike) if line["step"] in silent else not any(alike[:3])
    # Of the loss by position too.
    assert all(value > 0 for line in steps for value in line.get("loss_by_position", {}).values())
    folder = RunFolder(Path(run.output))
    draw_loss(folder.metrics, folder.picture)
    last = [line["loss"] for line in steps if line["loss"] is not None]
    lines = describe_end(RunResult(folder.root, got["progress"], True), 1.0)
    assert f"loss {last[0]:.3f} -> {last[-1]:.3f}; {len(silent)} steps not taken for nothing to learn" in lines
    assert sum("no token of its rows is learned" in line for line in got["said"]) == 1


def test_silent_step_in_backward_is_not_taken(tmp_path: Path) -> None:
    optimizer = {"weight_decay": 0.1, "in_backward": True, "clip": 0}
    run = silent_run(tmp_path, "run", optimizer=optimizer)
    got = run_train(1, run)
    silent = [line["step"] for line in got["metrics"] if line["kind"] == "step" and not line["targets"]]
    for step in (step for step in silent if step > 1):
        before, after = (state(Path(run.output), at) for at in (step - 1, step))
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_validation_without_targets_has_no_loss(tmp_path: Path) -> None:
    file = tmp_path / "held.jsonl"
    records = [{"input_ids": [1, 2, 3], "labels": [1, -100, -100]}] * 400 + [{"input_ids": list(range(9, 9 + LENGTH))}]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run = silent_run(tmp_path, "run", validation={"sources": [str(file)], "rows": 1, "every": 1})
    lines = [line for line in run_train(1, run)["metrics"] if line["kind"] == "validation"]
    assert [(line["loss"], line["targets"]) for line in lines] == [(None, 0)] * 8


def test_silent_step_between_bad_steps_keeps_their_row() -> None:
    progress = RunProgress()
    for targets, finite in ((5, False), (0, True), (5, False)):
        progress = progress.counting(targets=targets, finite=finite)
    assert (progress.bad, progress.in_a_row, progress.silent, progress.taken) == (2, 2, 1, 0)
