"""`benchmarks.training`: its documents, its job, and the table of its file; a whole run is slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import training
from ithaca.config.schema import load_run


def test_training_documents_are_packages() -> None:
    found = list(training.documents())
    assert sum(len(text) > 65_536 for text in found) > 10
    assert any(text.startswith("# asyncio/__init__.py\n") for text in found)


def test_training_job_is_a_run_file(tmp_path: Path) -> None:
    run = load_run(str(training.write_job(tmp_path, "tiny", 256, 14)), [])
    assert (run.stages[0].length, run.stages[0].steps, run.model.weights) == (256, 14, "random")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] >= 264
    every = (tmp_path / "documents.jsonl").stat().st_size
    training.write_job(tmp_path, "tiny", 256, 14, most=100_000)
    assert 100_000 < (tmp_path / "documents.jsonl").stat().st_size < every


def test_training_outside_time_is_total_less_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 4.0, 7.0, 8.0, 10.0])
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(clock))
    parts = training.Parts(torch.device("cpu"))
    assert [parts.around(call)(2) for call in (abs, float, str)] == [2, 2.0, "2"]
    assert parts.outside() == pytest.approx(0.2)


@pytest.mark.slow
def test_training_parts_run_on_cpu() -> None:
    over = training.overhead("tiny", 128, 4, 1)
    [only] = over["rounds"]
    assert over["overhead"] == only["overhead"] == only["trainer_s"] / only["bare_s"] - 1
    assert over["outside"] == only["trainer_s"] / only["dividing_s"] - 1
    assert 0 < over["between"] < 1
    ran = training.whole_run("tiny", 256, 14)
    assert [step["step"] for step in ran["taken"]] == list(range(1, 15))
    said = training.table({"overhead": over, "run": ran})
    assert f"{over['overhead']:.1%} more" in said
    assert f"{over['between']:.1%} outside forward, backward and optimizer" in said
    assert "tiny at 256, 14 steps: loss 5." in said
