"""Predicted steps against measured ones, and the directions in which time must move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ithaca.constants import GIB
from ithaca.planning.machine.hardware import H200
from ithaca.planning.memory_plan import Job, LayerMode, MemoryPlan
from ithaca.planning.model.flops import model_flops
from ithaca.planning.model.known_models import known_config
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.advice import plan_or_refuse
from ithaca.planning.terms.step_time import (
    ELEMENTWISE_SHARE,
    EXPERTS_SHARE,
    GIGA,
    LAUNCH_BACKWARD,
    LAUNCH_FORWARD,
    ROUTED_BACKWARD,
    ROUTED_FORWARD,
    TERA,
    StepTime,
    step_time,
)
from tests.planning.machines import machine
from tests.planning.models import B1, B8, LLAMA_8B, K
from tests.tolerances import PREDICTED_STEP

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
CELLS: list[dict[str, Any]] = [
    cell for cell in json.loads((RESULTS / "step.json").read_text())["cells"] if cell["system"] == "ithaca"
]
# Whole training steps, of all layers.
WHOLE: list[dict[str, Any]] = [
    cell for cell in json.loads((RESULTS / "longest.json").read_text())["cells"] if "whole" not in cell
]
ONE_H200 = machine("H200", gpus=1)


def named(cell: dict[str, Any]) -> str:
    return f"{cell['model']}-{cell['length']}-{cell['settings']['budget_gib']:.0f}"


def planned(cell: dict[str, Any], host: float = 90.0) -> tuple[ModelSizes, Job, MemoryPlan]:
    """The measured step again, in the budget it was told and so many GiB of the host."""
    sizes = {"8B": B8, "1B": B1}[cell["model"]]
    optimizer = cell["settings"].get("optimizer", "none")
    job = Job(cell["length"], weights="none", optimizer=optimizer, loss_in_place=True)
    return sizes, job, plan_or_refuse(sizes, job, int(cell["settings"]["budget_gib"] * GIB), int(host * GIB))


def predicted(cell: dict[str, Any]) -> StepTime:
    return step_time(*planned(cell), ONE_H200)


@pytest.mark.parametrize("cell", [*CELLS, *WHOLE], ids=named)
def test_what_was_measured_is_what_would_be_planned_today(cell: dict[str, Any]) -> None:
    # The best that fits what there was also is the best of what fits what it took.
    *_, plan = planned(cell, cell["pinned_gib"])
    assert plan.summary() == cell["plan"]


def seconds_of(time: StepTime, *names: str) -> float:
    return sum(term.seconds for term in time.terms if term.name in names)


@pytest.mark.parametrize("cell", CELLS, ids=named)
def test_measured_steps_are_predicted(cell: dict[str, Any]) -> None:
    time = predicted(cell)
    assert time.seconds == pytest.approx(cell["seconds"], rel=PREDICTED_STEP)
    assert time.utilisation(1.0) == pytest.approx(cell["model_tflops"], rel=PREDICTED_STEP)


def test_an_experts_block_is_predicted() -> None:
    measured = json.loads((RESULTS / "experts.json").read_text())
    config = known_config(measured["model"])
    assert config is not None
    layer = ModelSizes.from_config(config).layers[0]
    touch = ELEMENTWISE_SHARE * H200.bandwidth * GIGA
    for row in measured["rows"]:
        product = 2 * layer.active * row["tokens"] / (EXPERTS_SHARE * H200.matmul * TERA)
        copies, wide = (
            2 * row["tokens"] * layer.experts_per_token * config["hidden_size"],
            2 * row["tokens"] * layer.width,
        )
        forward = product + (ROUTED_FORWARD * copies + 3 * wide) / touch
        backward = 2 * product + (ROUTED_BACKWARD * copies + 6 * wide) / touch
        assert forward == pytest.approx(row["forward_s"], rel=PREDICTED_STEP)
        assert forward + backward == pytest.approx(row["both_s"], rel=PREDICTED_STEP)


def test_a_term_left_out_is_seen() -> None:
    cell = next(cell for cell in CELLS if cell["settings"]["budget_gib"] == 40)
    time = predicted(cell)
    for name in ("attention, forward", "attention, backward", "matrix products", "run again"):
        without = time.seconds - seconds_of(time, name)
        assert without < (1 - PREDICTED_STEP) * cell["seconds"], name


def test_all_four_cells_were_measured() -> None:
    assert {(cell["model"], cell["length"]) for cell in CELLS} == {("8B", 32 * K), ("8B", 128 * K), ("1B", 256 * K)}


def plan(mode: LayerMode = "save", *, away: bool = False, groups: int = 1, tile: int = 8 * K) -> MemoryPlan:
    return MemoryPlan((mode,) * 32, (away,) * 32, mlp_tile=tile, loss_tile=4096, head_groups=groups)


def test_modes_cost_what_they_run_again() -> None:
    job = Job(64 * K, sp=8)
    times = {mode: step_time(B8, job, plan(mode), machine()) for mode in ("keep", "save", "recompute")}
    assert times["keep"].seconds < times["save"].seconds < times["recompute"].seconds
    assert seconds_of(times["keep"], "run again") == 0
    attention = seconds_of(times["save"], "attention, forward")
    again = seconds_of(times["recompute"], "run again") - seconds_of(times["save"], "run again")
    assert again == pytest.approx(attention)


def test_head_groups_hide_exchanges_under_attention() -> None:
    job = Job(512 * K, sp=2, dp=4)
    shown = [step_time(B8, job, plan(groups=groups), machine()).exchange_share for groups in (1, 2, 4)]
    assert shown == sorted(shown, reverse=True)
    assert shown[2] < 0.5 * shown[0]
    assert step_time(B8, Job(512 * K, dp=8), plan(), machine()).exchange_share == 0


def test_copies_show_only_beside_short_attention() -> None:
    slow = replace(ONE_H200, device=replace(ONE_H200.device, host_copy=15.0))
    jobs = (Job(2 * K, batch=64), Job(128 * K))
    short, long = (step_time(B8, job, plan(away=True), slow) for job in jobs)
    quick = step_time(B8, jobs[0], plan(away=True), ONE_H200)
    assert seconds_of(quick, "host copies") == 0
    assert seconds_of(short, "host copies") > 0
    assert seconds_of(long, "host copies") == 0


def test_weights_on_the_host_and_over_a_slow_network_show() -> None:
    job = Job(4 * K, sp=8, dp=2)
    near, far = (
        step_time(B8, job, plan(tile=512), machine(nodes=2, network=name))
        for name in ("InfiniBand NDR", "Ethernet 10G")
    )
    assert seconds_of(far, "weights") > 10 * seconds_of(near, "weights")
    moved = step_time(
        B8,
        replace(job, weights_on_host=True, gradients_on_host=True, optimizer_on_host=True),
        plan(tile=512),
        machine(nodes=2),
    )
    assert seconds_of(moved, "optimizer") > 10 * seconds_of(near, "optimizer")


def test_rows_and_groups_make_tokens() -> None:
    job = Job(32 * K, sp=4, dp=2, accumulate=True)
    one, four = (step_time(B8, job, plan(), machine(), rows=rows) for rows in (1, 4))
    assert (one.tokens, four.tokens) == (2 * 32 * K, 8 * 32 * K)
    # The optimizer steps once.
    assert one.seconds < four.seconds / 3.5 < 1.2 * one.seconds
    assert four.flops == 4 * one.flops


def test_a_ring_does_the_same_work() -> None:
    ulysses, ring = Job(1024 * K, sp=8), Job(1024 * K, ring=8)
    times = [step_time(B8, job, plan(), machine()) for job in (ulysses, ring)]
    assert times[0].flops == times[1].flops == model_flops(B8, {1024 * K: 1}, 1024 * K)
    assert times[0].ranks == times[1].ranks == 8
    assert times[0].seconds == pytest.approx(times[1].seconds, rel=0.05)
    assert seconds_of(times[1], "exchange") == 0


def test_windows_and_adapters_do_less() -> None:
    windowed = ModelSizes.from_config({**LLAMA_8B, "sliding_window": 4096, "model_type": "mistral"})
    job = Job(256 * K, sp=8)
    full, near = (step_time(sizes, job, plan(), machine()) for sizes in (B8, windowed))
    assert seconds_of(near, "attention, forward") < 0.1 * seconds_of(full, "attention, forward")
    lora = step_time(B8.with_lora(16), job, plan(), machine())
    assert seconds_of(lora, "matrix products") == pytest.approx(2 / 3 * seconds_of(full, "matrix products"))
    assert seconds_of(lora, "optimizer") < 0.05 * seconds_of(full, "optimizer")


def test_the_documented_predictions_are_the_predictions() -> None:
    text = (Path(__file__).parents[3] / "docs/plan.md").read_text()
    for cell in CELLS:
        name = f"| {cell['model']}, {cell['length'] // K}K, {cell['settings']['budget_gib']:.0f} GiB |"
        assert f"{name} {cell['seconds']:.2f} s | {predicted(cell).seconds:.2f} s |" in text
    assert f"({LAUNCH_FORWARD * 1e3:.1f} ms forward, {LAUNCH_BACKWARD * 1e3:.1f} ms backward there)" in text
