"""The commands of the README and the examples are run as a new user would run them; every file named exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_files_named_exist() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(linked) > 4
    missing = [name for name in linked if not (ROOT / name).exists()]
    assert not missing


def test_readme_public_names_exist() -> None:
    import ithaca

    names = set(re.findall(r"ithaca\.(\w+)\(", README))
    assert {"init_mesh", "parallelize", "causal_loss", "save_pretrained", "count_tokens"} <= names
    assert names <= set(dir(ithaca))


def test_readme_plan_shown_is_the_plan_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from ithaca.cli import app

    monkeypatch.chdir(tmp_path)
    (command, shown) = re.findall(r"^\$ ithaca (plan .+?)\n(.+?)```", README, re.M | re.S)[0]
    made = CliRunner().invoke(app, command.split(), catch_exceptions=False).stdout
    lines = {" ".join(line.split()) for line in made.splitlines()}
    assert {" ".join(line.split()) for line in shown.strip().splitlines()} <= lines


@pytest.mark.slow
def test_readme_logging_line_shows_the_memory_plan(tmp_path: Path) -> None:
    [line] = re.findall(r"^`(logging\..+?)` it says so", README, re.M)
    step = (
        "import logging, torch, ithaca\n"
        "from ithaca.verify.small_models.features import small_batch, small_model\n"
        f"{line}\n"
        "mesh = ithaca.init_mesh(device='cpu')\n"
        "model = ithaca.parallelize(small_model('llama', dtype=torch.float32), mesh)\n"
        "ithaca.causal_loss(model, small_batch(1, 12), mesh)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", step], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^INFO:ithaca:memory: 2 keep; 0 offloaded;", done.stderr, re.M), done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("command", re.findall(r"^torchrun (.+?)(?:\s+#.*)?$", README, re.M))
def test_readme_torchrun_command_trains(command: str, tmp_path: Path) -> None:
    words = [str(ROOT / word) if word.endswith(".py") else word for word in command.split()]
    launch = [sys.executable, "-m", "torch.distributed.run", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "0", "PYTHONPATH": str(ROOT)}
    # What a process says that aborts stands before torchrun's own report.
    environment["PYTHONFAULTHANDLER"] = "1"
    done = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1.0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain_pytorch_model")
    assert model.config.num_attention_heads == 8
