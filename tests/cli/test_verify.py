"""Tests of `ithaca verify` as a user types it: mistakes in a sentence, the checklist, JSON, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ithaca.cli import app
from ithaca.errors import ConfigError, MeshError
from ithaca.verify.checks import Line
from ithaca.verify.verify_page import Page
from tests.training.runs import small_run, tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent


def typed(*words: str, folder: Path) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "ithaca", "verify", "--device", "cpu", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no.yaml"], r"no\.yaml does not exist"),
        (["mesh.ring=2"], "ring attention is not there yet"),
        (["mesh.sp=1"], "--sp 1 leaves one process"),
        (["stages.0.sp=1", "stages.1.sp=9"], "8 heads over sp=9"),
        (["--model", "llama", "--sp", "1"], "--sp 1 leaves one process"),
        (["--model", "llama", "--sp", "0"], "--sp 0 leaves one process .*: use --sp 2 or more"),
        (["--model", "llama", "--length", "7"], "--length 7: use 24 tokens at least"),
        (["--model", "llama", "--layers", "0"], "--layers 0: use one at least"),
        (["--model", "llama", "--json", "."], "--json . is a folder: name a file"),
        (["--model", "llama", "--device", "tpu"], "choose auto, cpu or cuda"),
        (["--model", "llama", "--device", "cuda"], "torch sees no GPU here"),
        (["--model", "llama", "--json", "nowhere/out.json"], "there is no folder .*nowhere"),
    ],
)
def test_mistake_in_options_is_refused_before_launch(words: list[str], said: str) -> None:
    with pytest.raises((ConfigError, MeshError), match=said):
        CliRunner().invoke(app, ["verify", *words], catch_exceptions=False)


def test_page_with_failed_check_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page(shows=True)
    lines = [Line("loss", 1e-16, 1e-10, "of rows"), Line("isolation", float("inf"), 0.0, "leaks [here]")]
    for line in lines:
        page.line(line)
    page.close(lines, 3.0)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("ok  loss")
    assert printed[1].startswith("off isolation")
    assert printed[1].endswith("leaks [here]")
    assert printed[2].startswith("1 of 2 checks are off: isolation")


@pytest.mark.slow
def test_refused_model_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    file = tiny_model(tmp_path / "cut") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    status, output = typed("--model", "cut", folder=tmp_path)
    assert status == 2, output
    assert output.startswith("ithaca: cut/model.safetensors cannot be read")
    assert output.count("\n") == 1


@pytest.mark.slow
def test_verify_after_ctrl_c_prints_that_it_stopped(tmp_path: Path) -> None:
    """And leaves no folder behind, wherever the ranks are."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "ithaca", "verify", "--device", "cpu", "--model", "llama"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ok  loss"):
                break
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert message.startswith("ithaca: verify was stopped before its end")
    assert message.count("\n") == 1
    assert not list(tmp_path.glob("ithaca-*"))


@pytest.mark.slow
def test_verify_of_a_run_takes_its_own_rows(tmp_path: Path) -> None:
    run = small_run(tmp_path, "unused")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
    status, output = typed("run.yaml", "--json", "out.json", folder=tmp_path)
    assert status == 0, output
    assert "2 rows of your data" in output
    result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())["cpu"]
    assert f"all {len(result['checks'])} checks are right" in output
    assert result["ok"]
    assert (result["sp"], result["dtype"], result["model_type"]) == (2, "float64", "llama")
    assert "weights of the folder" in result["notes"]
    assert all(check["ok"] and check["figure"] <= check["limit"] for check in result["checks"])
    assert not (tmp_path / "unused").exists(), "verifying leaves no run behind"


@pytest.mark.slow
def test_failed_check_ends_with_status_1(tmp_path: Path) -> None:
    """The ranks run an entry that plants a fault first."""
    # Held by a name, because a context that is collected undoes what it planted.
    plant = "from tests import faults\nplanted = faults.document_leak()\nplanted.__enter__()\n"
    (tmp_path / "planted.py").write_text(plant + "from ithaca.cli.verify import work as work\n")
    start = (
        "from ithaca.cli import main; from ithaca.launch import launcher; own = launcher.launch; "
        "launcher.launch = lambda entry, *rest, **more: own('planted:work', *rest, **more); main()"
    )
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", start, "verify", "--device", "cpu", "--model", "llama", "--json", "out.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "off documents" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())["cpu"]
    assert not result["ok"]
    off = [check["name"] for check in result["checks"] if not check["ok"]]
    assert {"documents", "isolation"} <= set(off)
