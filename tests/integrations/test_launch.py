"""The examples, started as a user would start them: torchrun, accelerate launch, a notebook's launcher, plain python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Without GPUs `accelerate launch` starts several processes only where MPI is installed, unless it is told of GPUs.
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
SLOW = pytest.mark.slow


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "0", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder), "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }  # fmt: skip
    launch = [sys.executable, *command]
    return subprocess.run(launch, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def _losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"(?<![_a-z])'?loss'?:? '?(\d+\.\d+)", output)]


@pytest.mark.parametrize(
    ("launcher", "example"),
    [
        pytest.param(TORCHRUN, "trainer", marks=SLOW),
        pytest.param(TORCHRUN, "sft", marks=SLOW),
        pytest.param(TORCHRUN, "accelerator", marks=SLOW),
        pytest.param(ACCELERATE, "accelerator", marks=SLOW),
        pytest.param(ACCELERATE, "trainer", marks=SLOW),
    ],
    ids=["torchrun trainer", "torchrun sft", "torchrun accelerator", "accelerate accelerator", "accelerate trainer"],
)
def test_example_runs(launcher: list[str], example: str, tmp_path: Path) -> None:
    done = _run([*launcher, str(ROOT / f"examples/{example}.py")], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = _losses(done.stdout)
    assert len(losses) == 10, done.stdout
    assert losses[-1] < losses[0] - 0.5
    if example == "sft":
        assert (tmp_path / "sft_model/adapter_model.safetensors").exists()
    else:
        assert AutoConfig.from_pretrained(tmp_path / f"{example}_model").num_attention_heads == 8


def _rewritten(folder: Path, example: str, old: str, new: str) -> str:
    source = (ROOT / f"examples/{example}.py").read_text()
    assert old in source
    script = folder / "script.py"
    script.write_text(source.replace(old, new))
    return str(script)


@pytest.mark.slow
def test_one_process_with_degree_two_says_what_to_type(tmp_path: Path) -> None:
    done = _run([str(ROOT / "examples/accelerator.py")], tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"MeshError: sp=2 .* 1 process: start 2 processes \(torchrun --nproc-per-node 2 \.\.\.\)", last), (
        last
    )


@pytest.mark.slow
@pytest.mark.parametrize("example", ["trainer", "accelerator"])
def test_one_process_with_degree_one_runs(example: str, tmp_path: Path) -> None:
    alone = _run([_rewritten(tmp_path, example, "sp_size=2", "sp_size=1")], tmp_path)
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert len(_losses(alone.stdout)) == 10
    assert AutoConfig.from_pretrained(tmp_path / f"{example}_model").num_attention_heads == 8


NOTEBOOK = """
from accelerate import debug_launcher

def training():
{body}

if __name__ == "__main__":
    debug_launcher(training, num_processes=2)
"""


@pytest.mark.slow
def test_notebook_launch_runs(tmp_path: Path) -> None:
    """Start a function in forked processes, as a notebook cell does on a machine without GPUs."""
    body = (
        (ROOT / "examples/accelerator.py").read_text().replace("__file__", repr(str(ROOT / "examples/accelerator.py")))
    )
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK.format(body="\n".join(f"    {line}" for line in body.splitlines())))
    done = _run([str(script)], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    # accelerate's launcher gives every process the local rank 0, so each prints.
    losses = _losses(done.stdout)
    assert len(losses) == 20
    assert len(set(losses)) == 10
