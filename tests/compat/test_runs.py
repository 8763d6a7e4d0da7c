"""Runs that an earlier version left go on: the losses and weights are those that it got itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.compat.held import missing, read, run_alone

MADE = read("made.json")
STOPPED = [name for name, run in MADE["runs"].items() if "status" in run]
# Kernels of other instructions or another torch add in another order; a lost moment or row is 1e-3 and more.
ELSEWHERE = 1e-5
SAME_MACHINE = (torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability()) == (
    MADE["torch"],
    MADE["transformers"],
    MADE["capability"],
)


def same(numbers: Any, *, over_ranks: bool = False) -> Any:
    """The very numbers where they were made with the same kernels, else all but.

    What is summed over ranks may be summed in another order by a later version: weights were 4e-8 off, losses not.
    """
    off = 0 if SAME_MACHINE and not over_ranks else ELSEWHERE
    return pytest.approx(numbers, rel=off, abs=off)


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


def losses(name: str) -> list[float]:
    return [record["loss"] for record in records(name) if record["kind"] == "step"]


def weights(folder: Path) -> dict[str, list[float]]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[name] = [float(tensor.double().sum()), float(tensor.double().square().sum())]
    return found


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(
    "name", [one if one == "stages" else pytest.param(one, marks=pytest.mark.slow) for one in STOPPED]
)
def test_stopped_run_goes_on_with_the_numbers_of_then(name: str) -> None:
    then = MADE["runs"][name]
    before = {record["kind"]: record for record in records(name)}
    status, said = run_alone(f"train {name}.yaml")
    assert status == 0, said
    assert f"{then['steps']} steps done" in said, "it went on from the checkpoint"
    assert losses(name) == same(then["losses"])
    found = weights(Path("runs", name, "export"))
    assert found.keys() == then["weights"].keys()
    for tensor, sums in then["weights"].items():
        assert found[tensor] == same(sums, over_ranks=name == "ranks"), tensor
    # The lines of metrics that follow say all that those before them say.
    now = {record["kind"]: record for record in records(name)[len(before) :]}
    assert [fault for kind in before for fault in missing(before[kind], now[kind], kind)] == []


@pytest.mark.slow
@pytest.mark.usefixtures("work")
def test_stopped_run_without_its_cache_makes_the_same_tokens_again() -> None:
    shutil.rmtree("cache")
    status, said = run_alone("train ranks.yaml")
    assert status == 0, said
    assert losses("ranks") == same(MADE["runs"]["ranks"]["losses"])


@pytest.mark.slow
@pytest.mark.usefixtures("work")
def test_stopped_run_on_more_ranks_goes_on_with_the_losses_of_then() -> None:
    status, said = run_alone("train stages.yaml launch.processes=2 mesh.sp=2")
    assert status == 0, said
    assert losses("stages") == pytest.approx(MADE["runs"]["stages"]["losses"], abs=ELSEWHERE)


@pytest.mark.slow
@pytest.mark.usefixtures("work")
def test_ended_run_with_a_longer_stage_goes_on_where_its_model_is_moved_away() -> None:
    # The earlier version lengthened no ended run, and left no mark in models by which a run knows its own.
    Path("runs/ended/stages/1-64").rename("before")
    status, said = run_alone("train ended.yaml stages.0.steps=6")
    assert status == 0, said
    assert losses("ended")[:4] == MADE["runs"]["ended"]["losses"]
    assert len(losses("ended")) == 6
