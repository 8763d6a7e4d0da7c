"""The step benchmark without a GPU: its cells, resume logic, table and FLOPs, and every peer's gradients on a CPU.

The peers' own packages are looked for where they are installed and in a folder `.carry`; without them their part is
skipped. Invariant kept: each system computes the same gradients as the plain model, so their times are of equal work.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import documents as documents_of
from benchmarks import floor, peers, step
from benchmarks.floor import SHAPES
from tests.ranks import ROOT

CARRY = ROOT / ".carry"
CPU = torch.device("cpu")
# fp32 against fp32: sums taken in another order.
CLOSE = 1e-4


def options(**given: Any) -> argparse.Namespace:
    usual: dict[str, Any] = {
        "cells": "tiny:96", "systems": "transformers,ithaca", "memory": "auto", "budget": None, "documents": None,
        "kernel": None, "alst": "{}",
        "layers": None, "warmup": 0, "repeat": 1, "short": 4096, "limit": 60.0, "total": float("inf"), "again": False,
        "packages": None, "device": "cpu",
    }  # fmt: skip
    return argparse.Namespace(**usual | given)


def cell(system: str = "ithaca", model: str = "8B", length: int = 2**15, **more: Any) -> dict[str, Any]:
    usual = {"memory": "auto"} if system == "ithaca" else {}
    return {"system": system, "model": model, "length": length, "settings": usual, "outcome": "done"} | more


@pytest.mark.parametrize(("text", "length"), [("32K", 32_768), ("1M", 1_048_576), ("96", 96), ("1k", 1024)])
def test_length_is_parsed_and_shown(text: str, length: int) -> None:
    assert step.parse_length(text) == length
    assert step.parse_length(step.show_length(length)) == length


@pytest.mark.parametrize(("system", "base"), list(peers.FA4.items()))
def test_peer_with_flash_attention_4_is_that_peer_with_another_attention(
    monkeypatch: pytest.MonkeyPatch, system: str, base: str
) -> None:
    chosen: list[str] = []

    class Model:
        def set_attn_implementation(self, name: str) -> None:
            chosen.append(name)

    monkeypatch.setattr(peers, "checkpointed_step", lambda model: chosen.append("transformers"))
    monkeypatch.setattr(peers, "apply_liger", lambda model, swiglu: chosen.append("liger"))
    monkeypatch.setattr(peers, "alst_step", lambda model, settings, backend: chosen.append(f"alst {backend}"))
    peers.make_step(system, Model(), {})
    assert chosen[0] == "flash_attention_4"
    after = {"transformers": ["transformers"], "liger": ["liger", "transformers"]}
    assert chosen[1:] == after.get(base, [f"alst {peers.BACKENDS['alst-cudnn']}"])


def test_step_cells_are_parsed_or_refused() -> None:
    assert step.parse_cells("8B:32K,1B:256K") == [("8B", 2**15), ("1B", 2**18)]
    with pytest.raises(SystemExit, match="7B:32K: write model:length"):
        step.parse_cells("7B:32K")


@pytest.mark.parametrize(("name", "total"), [("1B", 1_235_814_400), ("3B", 3_212_749_824), ("8B", 8_030_261_248)])
def test_step_models_have_published_weight_counts(name: str, total: int) -> None:
    shape = SHAPES[name]
    norms = (2 * shape.layers + 1) * shape.hidden
    embedding = 0 if shape.tied else shape.vocab * shape.hidden
    assert shape.linear_weights() + embedding + norms == total


@pytest.mark.parametrize(("documents", "count"), [("7", 9), ("log-normal", 6)])
def test_positions_begin_anew_with_each_document(documents: str, count: int) -> None:
    length = 60 if documents == "7" else 10_000
    found = documents_of.positions(documents, length)
    assert found.shape == (1, length)
    starts = (found[0] == 0).nonzero().flatten().tolist()
    assert starts[0] == 0
    assert len(starts) == count
    assert torch.equal(found[0].diff() == 1, found[0, 1:] != 0)


@pytest.mark.slow
def test_step_of_documents_runs_and_differs_from_one_of_a_whole_row(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    losses = []
    for documents in (None, "7"):
        given = options(systems="ithaca", documents=documents, file=file)
        result = step.load(file)
        step.run_all(step.wanted(given, result), result, given)
        losses.append(result["cells"][-1]["loss"])
    assert losses[0] != losses[1]


def test_flops_equal_those_of_model() -> None:
    shape, length = SHAPES["tiny"], 64
    model = floor.build_model(shape, length, CPU, torch.float32)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert shape.linear_weights() == linear
    # Two products of 2 * D for every pair of a query and a key, half of the square.
    pairs = length**2 / 2
    attention = 2 * 2 * shape.head_size * pairs * shape.heads * shape.layers
    assert floor.step_flops(shape, length) == 6 * linear * length + 3.5 * attention


def test_floor_is_sum_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(floor, "seconds", lambda call, device: calls.append(call()) or 1.0)
    monkeypatch.setattr(floor, "HEAD_TOKENS", 48)
    monkeypatch.setattr(floor, "WHOLE_ATTENTION", 48)
    found = floor.floor(SHAPES["tiny"], 96, CPU, torch.float32)
    # A layer: attention forward and backward, a kv head at a time (2); seven products, three ways. Head: twice 48.
    assert found["seconds"] == 2 * (2 * 2 + 7 * 3) + 2 * 3
    assert found["attention"]["timed_heads"] == [2, 1]


def test_step_cell_key_holds_settings() -> None:
    result: dict[str, Any] = {"runs": [], "cells": []}
    first = step.wanted(options(), result)
    assert [c["system"] for c in first] == ["transformers", "ithaca"]
    assert first[0]["short"] == 96
    for asked in first:
        step.record(result, "step", asked, {"outcome": "done", "seconds": 1.0, "machine": {"device": "x"}})
    assert step.wanted(options(), result) == []
    assert len(result["runs"]) == 1
    assert [c["system"] for c in step.wanted(options(memory='{"anchors": "all"}'), result)] == ["ithaca"]
    assert [c["system"] for c in step.wanted(options(budget=24.0), result)] == ["ithaca"]
    assert len(step.wanted(options(layers=1), result)) == 2
    assert len(step.wanted(options(again=True), result)) == 2
    assert step.settings_of("ithaca", options(memory="null"))["memory"] is None
    assert step.settings_of("alst-fa2", options(alst='{"offload": "recipe"}')) == {"offload": "recipe", "loss": "liger"}


def test_step_failed_cell_runs_again() -> None:
    result: dict[str, Any] = {"runs": [], "cells": []}
    asked = step.wanted(options(systems="liger"), result)[0]
    step.record(result, "step", asked, {"outcome": "failed", "error": "no triton"})
    assert len(step.wanted(options(systems="liger"), result)) == 1
    step.record(result, "step", asked, {"outcome": "out of memory"})
    assert step.wanted(options(systems="liger"), result) == []
    assert [c["outcome"] for c in result["cells"]] == ["out of memory"]


def test_step_file_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "step.json"
    assert step.load(file) == {"runs": [], "cells": []}
    step.save(file, {"runs": [], "cells": [cell()]})
    assert step.load(file)["cells"] == [cell()]
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("left", "status", "outcome"),
    [
        (None, 1, "failed"),
        (None, -9, "killed"),
        (None, None, "over the limit"),
        ('{"outcome": "not done"}', None, "over the limit"),
        ('{"outcome": "not done", "seconds": 1.5}', None, "done"),
        ('{"outcome": "out of memory", "allocated_gib": 139.0}', 0, "out of memory"),
    ],
)
def test_step_cell_outcome_is_recorded(
    monkeypatch: pytest.MonkeyPatch, left: str | None, status: int | None, outcome: str
) -> None:
    def fake(command: list[str], **given: Any) -> Any:
        if left:
            Path(command[4]).write_text(left)
        if status is None:
            raise subprocess.TimeoutExpired(command, given["timeout"])
        return subprocess.CompletedProcess(command, status, "", "last words")

    monkeypatch.setattr(subprocess, "run", fake)
    got = step.run_cell(cell(), 5.0, None)
    assert got["outcome"] == outcome
    assert ("last words" in got.get("error", "")) == (status in (1, -9))


def test_step_beyond_time_limit_is_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result: dict[str, Any] = {"runs": [], "cells": []}
    monkeypatch.setattr(step, "run_cell", lambda *_: {"outcome": "over the limit"})
    arguments = options(file=tmp_path / "step.json", total=30.0)
    step.run_all(step.wanted(arguments, result), result, arguments)
    assert result["cells"] == []
    arguments.total = 90.0
    step.run_all(step.wanted(arguments, result), result, arguments)
    assert [c["outcome"] for c in result["cells"]] == ["over the limit"] * 2
    assert step.load(arguments.file) == result


def test_step_table_shows_cells() -> None:
    bare = cell("floor", seconds=3.9)
    ours = cell(seconds=4.84, allocated_gib=39.14, reserved_gib=41.0, loss=11.76)
    cells = [
        ours,
        bare,
        cell("transformers", length=2**17, outcome="out of memory", allocated_gib=120.0),
        cell(settings={"memory": {"offload": True}}, seconds=5.5, allocated_gib=30.0),
    ]
    lines = step.table(cells).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "transformers", "ithaca", 'ithaca, memory={"offload": true}', "floor",
    ]  # fmt: skip
    assert [text.strip() for text in lines[0].split("|")[2:4]] == ["8B, 32K", "8B, 128K"]
    assert "4.8 s, 39.1 GiB" in lines[3]
    assert "out of memory (at 120.0 GiB)" in lines[2]
    assert "3.9 s" in lines[5]
    assert "1.24x the floor" in step.detail(ours, cells)
    assert "41.0 GiB reserved" in step.detail(ours, cells)
    assert "floor" not in step.detail(ours | {"settings": {"memory": "auto", "layers": 2}}, cells)


def test_step_plot_is_written(tmp_path: Path) -> None:
    cells = [cell(length=n, seconds=n / 1e4, allocated_gib=n / 1e3) for n in (2**13, 2**14, 2**15)]
    assert list(step.curves(cells)) == ["ithaca, 8B"]
    step.plot([*cells, cell("transformers", outcome="out of memory")], tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_step_out_of_memory_is_distinguished_from_errors() -> None:
    assert peers.outcome_of(torch.OutOfMemoryError("CUDA out of memory")) == "out of memory"
    assert peers.outcome_of(ValueError("wrong")) == "failed"
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = torch.OutOfMemoryError("no room")
    assert peers.outcome_of(wrapped) == "out of memory"


def plain_gradients(length: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the model as transformers runs it, nothing checkpointed."""
    model: Any = floor.build_model(SHAPES["tiny"], length, CPU, torch.float32)
    ids = torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach()), peers.gradients(model)


def compare(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, rtol=CLOSE, atol=CLOSE * float(grad.abs().max()), msg=name)


def test_step_planted_fault_is_caught() -> None:
    """A weight gradient a thousandth too large, as a loss scaled after the call would leave behind."""
    _, wanted = plain_gradients(50)
    compare(dict(wanted), wanted)
    with pytest.raises(AssertionError, match=r"lm_head\.weight"):
        compare(wanted | {"lm_head.weight": wanted["lm_head.weight"] * 1.001}, wanted)


@pytest.mark.parametrize("offloaded", [False, True])
def test_step_checkpointing_gives_plain_gradients(offloaded: bool) -> None:
    model: Any = floor.build_model(SHAPES["tiny"], 50, CPU, torch.float32)
    run = peers.checkpointed_step(model)
    if offloaded:
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = peers._OffloadedCheckpoint.apply
    ids = torch.randint(0, 128, (1, 50), generator=torch.Generator().manual_seed(1))
    loss, wanted = plain_gradients(50)
    assert float(run(ids)) == pytest.approx(loss, rel=CLOSE)
    compare(peers.gradients(model), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "settings"),
    [
        ("transformers", {}),
        ("alst-fa2", {"loss": "tiled", "offload": "deepspeed"}),
        ("alst-cudnn", {"loss": "tiled", "offload": "recipe"}),
        ("ithaca", {"memory": None}),
    ],
)
def test_step_every_system_gives_plain_gradients(system: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """In a process of its own, as the program runs it: peers patch what they find. 50 tokens leave a short tile."""
    if system.startswith("alst") and not (importlib.util.find_spec("deepspeed") or (CARRY / "deepspeed").is_dir()):
        pytest.skip("deepspeed is not installed")
    asked = cell(system, "tiny", 50, settings=settings, device="cpu", warmup=1, repeat=1, short=0)
    got = step.run_cell(asked | {"gradients": str(tmp_path / "grads.pt")}, 240.0, CARRY if CARRY.is_dir() else None)
    assert got["outcome"] == "done", got
    loss, wanted = plain_gradients(50)
    assert got["loss"] == pytest.approx(loss, rel=CLOSE)
    compare(torch.load(tmp_path / "grads.pt"), wanted)


@pytest.mark.slow
def test_step_program_resumes_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    command = [sys.executable, "-m", "benchmarks.step", str(file), "--cells", "tiny:96", "--device", "cpu"]
    command += ["--systems", "floor", "--limit", "120"]
    first = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    again = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert first.stdout.splitlines()[-3:] == again.stdout.splitlines()[-3:]
    saved = step.load(file)
    assert [c["outcome"] for c in saved["cells"]] == ["done"]
    assert saved["runs"][0]["command"].startswith("python -m benchmarks.step step.json")
