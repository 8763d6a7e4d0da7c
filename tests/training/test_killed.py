"""A run killed with -9 again and again, while it writes checkpoints too, ends bit for bit as one left in peace."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.training.runs import export_sum, losses, metrics, small_run

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS, KILLS = 120, 8


def start(file: Path) -> subprocess.Popen[bytes]:
    """The run, what it says in a file beside it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "ithaca", "train", str(file)]
    with file.with_suffix(".txt").open("wb") as said:
        return subprocess.Popen(command, cwd=file.parent, env=environment, stdout=subprocess.DEVNULL, stderr=said)


def finish(file: Path) -> None:
    status = start(file).wait(600)
    assert status == 0, file.with_suffix(".txt").read_text()[-3000:]


def written(place: Path, name: str) -> tuple[Path, Path]:
    """A run's file and its output folder."""
    stages = [{"length": 64, "steps": STEPS, "batch": 2, "lr": 3e-3}]
    run = small_run(place, name, stages=stages, checkpoints={"save_every": 4}, launch={"processes": 2, "device": "cpu"})
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    return file, Path(run.output)


def steps_done(output: Path) -> int:
    file = output / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def partial(output: Path) -> bool:
    """Whether a checkpoint is being written, or was when its run ended."""
    folder = output / "checkpoints"
    return folder.is_dir() and any(name.startswith(".") for name in os.listdir(folder))


def kill_sometime(job: subprocess.Popen[bytes], output: Path, draw: random.Random, writing: bool) -> bool | None:
    """Kill the launcher or a rank: while a checkpoint is being written, or at a moment of a training run's own.

    Gives whether one was being written just then; None where the run ended first.
    """
    before = steps_done(output)
    while steps_done(output) == before:
        if job.poll() is not None:
            return None
        time.sleep(0.01)
    # Not multiprocessing's resource tracker, whose end nobody would notice.
    ranks = [child for child in psutil.Process(job.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    victim = draw.choice([psutil.Process(job.pid), *ranks])
    time.sleep(draw.uniform(0, 1.0))
    deadline = time.monotonic() + 20
    while writing and not partial(output) and job.poll() is None and time.monotonic() < deadline:
        pass
    if job.poll() is not None:
        return None
    within = partial(output)
    try:
        victim.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return None
    job.wait(60)
    psutil.wait_procs(ranks, timeout=30)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    return within


@pytest.mark.slow
def test_run_killed_at_eight_moments_ends_as_one_left_in_peace(tmp_path: Path) -> None:
    peaceful, there = written(tmp_path, "peaceful")
    finish(peaceful)
    killed, output = written(tmp_path, "killed")
    draw, kills, within, left = random.Random(11), 0, 0, 0
    while kills < KILLS:
        found = kill_sometime(start(killed), output, draw, writing=kills % 2 == 0)
        if found is None:
            break
        kills, within, left = kills + 1, within + found, left + partial(output)
    assert kills == KILLS, "the run ended before it was killed often enough: give it more steps"
    assert within >= KILLS // 4, "too few ends were within a checkpoint's writing"
    assert left > 0, "no end left a checkpoint half written"
    finish(killed)
    runs = [small_run(tmp_path, name) for name in ("peaceful", "killed")]
    assert export_sum(runs[1]) == export_sum(runs[0]) is not None
    ours, theirs = ({"metrics": metrics(run)} for run in runs)
    assert losses(theirs) == losses(ours)
    assert len(losses(ours)) == STEPS
    assert there != output
