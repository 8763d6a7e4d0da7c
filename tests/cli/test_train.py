"""Tests of `ithaca train` as a user types it: settings shown, mistakes in a sentence, whole and stopped runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ithaca.cli import app
from ithaca.cli.run_words import split_words
from ithaca.config.schema import RunSettings, load_run, read_run
from ithaca.errors import ConfigError, MeshError, UnsupportedError
from tests.training.runs import small_run

ROOT = Path(__file__).resolve().parent.parent.parent


def typed(*words: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "ithaca", "train", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_show_prints_every_key_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 4\n")
    result = CliRunner().invoke(app, ["train", str(file), "stages.0.length=4k", "--show"])
    assert result.exit_code == 0
    shown = read_run(yaml.safe_load(result.stdout))
    assert shown == load_run(file, ["stages.0.length=4k"])
    assert (shown.seed, shown.stages[0].length) == (4, 4096)
    assert set(yaml.safe_load(result.stdout)) == set(RunSettings.model_fields)


def test_first_word_without_equals_is_the_run_file() -> None:
    assert split_words(["run.yaml", "seed=3"]) == ("run.yaml", ["seed=3"])
    assert split_words(["seed=3"]) == (None, ["seed=3"])
    assert split_words([]) == (None, [])


def test_attention_dropout_is_refused_before_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_head": 2, "attn_pdrop": 0.1}')
    words = ["train", f"model.name={tmp_path}", "stages.0.length=64"]
    with pytest.raises(UnsupportedError, match=r"^config\.attn_pdrop=0\.1: .* type model\.config\.attn_pdrop=0 beside"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    monkeypatch.setattr("ithaca.launch.launcher.launch", lambda *_, **__: 0)
    assert CliRunner().invoke(app, [*words, "model.config.attn_pdrop=0"]).exit_code == 0


TWO = ["launch.device=cpu", "launch.processes=2"]
ROWS = ["stages.0.batch=6", "stages.1.batch=6"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no.yaml"], r"no\.yaml does not exist"),
        (["stages.0.lenght=4k"], "did you mean 'length'"),
        (["launch.device=cuda", "launch.processes=2"], "torch sees no GPU here"),
        (["--nodes", "2"], "--nodes 2 needs --rendezvous"),
        (["mesh.ring=2"], r"use mesh\.ring=1$"),
        (
            [*TWO, "mesh.sp=3"],
            r"^mesh\.sp=3 does not divide the 2 ranks of this run: use mesh\.sp=2, or launch\.processes=3$",
        ),
        ([*TWO, "mesh.sp=3", "--processes", "4"], r"use mesh\.sp=4, or --processes 3$"),
        ([*TWO, "mesh.sp=3", "--processes", "4", *ROWS], r"use mesh\.sp=2, or --processes 3$"),
        (
            [*TWO, "stages.0.batch=2", "stages.1.sp=3"],
            r"^stages\.1\.sp=3 does not divide .* use stages\.1\.sp=2, or launch\.processes=3$",
        ),
        ([*TWO, "mesh.sp=1", "stages.0.batch=3"], r"stage 1 has batch 3 .* use stages\.0\.batch=4, or mesh\.sp=2$"),
        (
            [*TWO, "mesh.replicas=3"],
            r"^mesh\.replicas=3 does not divide the 2 ranks of this run: use mesh\.replicas=2$",
        ),
        (
            [*TWO, "mesh.sp=4", *ROWS, "--nodes", "3", "--node-rank", "1", "--rendezvous", "a:1"],
            r"the 6 ranks of this run: use mesh\.sp=3, or launch\.processes=4$",
        ),
    ],
)
def test_mistake_in_settings_is_refused_before_launch(words: list[str], said: str) -> None:
    with pytest.raises((ConfigError, MeshError), match=said):
        CliRunner().invoke(app, ["train", *words], catch_exceptions=False)


def test_degree_above_heads_is_refused_before_launch(tmp_path: Path) -> None:
    """The model's folder says how many heads there are; the degree advised has a rank for each, or fewer."""
    run = small_run(tmp_path, "heads", mesh={"sp": 8}, launch={"processes": 8, "device": "cpu"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
    with pytest.raises(MeshError, match=r"^mesh\.sp=8, but the model has 4 attention heads, .* use mesh\.sp=4$"):
        CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml")], catch_exceptions=False)


def test_advice_never_exceeds_the_gpus_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(MeshError, match=r"2 ranks of this run: use mesh\.sp=2$"):
        CliRunner().invoke(app, ["train", "mesh.sp=3", *ROWS], catch_exceptions=False)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": {"name": "./nowhere"}}, "model.name './nowhere': no such folder here"),
        ({"data": {"sources": ["nothing/"]}}, "nothing/"),
    ],
    ids=["model", "data"],
)
@pytest.mark.slow
def test_mistake_found_by_ranks_is_one_sentence(tmp_path: Path, more: dict[str, object], said: str) -> None:
    run = small_run(tmp_path, "wrong", **more)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
    output = (job := typed("run.yaml", folder=tmp_path)).communicate(timeout=120)[0]
    assert job.returncode == 2, output
    assert said in output
    assert "Traceback" not in output
    assert len([line for line in output.splitlines() if line.startswith("ithaca:")]) == 1


@pytest.mark.slow
def test_run_stopped_by_signal_resumes_when_typed_again(tmp_path: Path) -> None:
    stages = [{"length": 64, "steps": 400, "batch": 2, "lr": 1e-3}]
    run = small_run(tmp_path, "stopped", stages=stages, launch={"processes": 2, "device": "cpu"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
    job = typed("run.yaml", folder=tmp_path)
    lines = Path(run.output) / "metrics.jsonl"
    while not lines.exists() or len(lines.read_bytes().splitlines()) < 5:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    output = job.communicate(timeout=90)[0]
    assert job.returncode == 75, output
    assert "saved: the same command goes on from there" in output
    again = typed("run.yaml", folder=tmp_path)
    output = again.communicate(timeout=300)[0]
    assert again.returncode == 0, output
    assert "going on from" in output
    assert "loads in plain transformers" in output
    assert (Path(run.output) / "loss.png").stat().st_size > 5000
    last = typed("run.yaml", folder=tmp_path)
    output = last.communicate(timeout=90)[0]
    assert last.returncode == 0, output
    assert len(lines.read_bytes().splitlines()) == 401


@pytest.mark.slow
def test_embedded_run_without_arguments_finishes(tmp_path: Path) -> None:
    job = typed("stages.0.steps=3", "stages.1.steps=2", folder=tmp_path)
    output = job.communicate(timeout=400)[0]
    assert job.returncode == 0, output
    for name in ("export/model.safetensors", "export/tokenizer.json", "metrics.jsonl", "loss.png", "run.yaml"):
        assert (tmp_path / "runs" / "first" / name).exists(), name
    assert "next: your own documents and model" not in output
    assert "next: your own model and documents" in output
