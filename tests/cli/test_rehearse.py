"""Tests of `ithaca rehearse` as a user types it: the page, the JSON, and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ithaca.cli.plan_inputs import read_machine
from ithaca.cli.rehearse import _default_world, _read_job_machine, read_model_config, with_one_stage
from ithaca.config.schema import load_run
from ithaca.mesh import init_mesh
from ithaca.planning.model.known_models import known_config
from ithaca.rehearse import prediction
from ithaca.rehearse import rehearsal as proof
from ithaca.rehearse.lone_group import simulated_world
from ithaca.rehearse.rehearse_page import page
from ithaca.training.schedule import apply_stages
from ithaca.verify.small_models.features import small_config
from tests.tolerances import TRACED_MEMORY


@pytest.fixture
def run(typed: Any, own_folder: None) -> Any:
    return partial(typed, "rehearse")


@pytest.fixture
def small(tmp_path: Path) -> str:
    folder = tmp_path / "small"
    small_config("llama").save_pretrained(folder)
    return str(folder)


def real_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors take seconds a layer; the verb is the same with real ones."""
    request = prediction.RehearsalRequest
    monkeypatch.setattr(prediction, "RehearsalRequest", lambda *args, **kwargs: request(*args, **kwargs, fake=False))


def test_rehearsal_writes_page_and_json(run: Any, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_tensors(monkeypatch)
    file = tmp_path / "out" / "r.json"
    words = ("precision=fp32", "--model", small, "--length", "128", "--world", "4", "--rank", "1", "--json", str(file))
    status, out, err = run(*words)
    assert status == 0, err
    for said in (
        "rank 1 of 4 (dp=1, sp=4) of 4xH100", "128 tokens", "all 2 layers run", "optimizer state", "peak in backward",
        "host, pinned by the driver", "computing, all", "NVLink 4, 450 GB/s at 80%", "gradients of q, k, v",
    ):  # fmt: skip
        assert said in out, said
    assert "plan: 2 keep" in err
    report = json.loads(file.read_text())
    assert report["degrees"] == [1, 1, 4]
    assert report["peak"] == max(report["peaks"].values()) == sum(report["kinds"].values())
    assert report["memory_error"] == report["predicted"]["device_bytes"] / report["peak"] - 1
    assert len(report["figures"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("qwen3-4b", "--length", "64k", "--world", "4", "memory.on_host=everything", "memory.budget=16GB"),
        ("llama-3.2-1b", "--length", "1M", "--world", "8", "optimizer.name=adamw8bit"),
    ],
)
def test_rehearsal_of_a_gpu_job_runs_without_gpus(run: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Layers that are run again, copies to the host, states that live there or are in 8 bits."""
    file = tmp_path / "r.json"
    status, out, err = run("--model", *words, "--layers", "1", "--json", str(file))
    assert status == 0, err
    assert " save; " in err
    assert "on fake tensors (no GPU here)" in out
    report = json.loads(file.read_text())
    assert abs(report["memory_error"]) < TRACED_MEMORY
    planned = sum(term["host_bytes"] for term in report["predicted"]["memory"]["terms"])
    assert report["host"] == pytest.approx(planned, rel=1e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words",
    [
        ("qwen3-8b", "--length", "2M"),
        ("llama-3.2-1b", "--length", "1M", "--host-memory", "100GB", "--cap", "30GB"),
        ("qwen3-8b", "--length", "768k", "memory.host_budget=20GiB"),
        ("qwen3-8b", "--length", "128k", "memory.layers=keep", "memory.loss_tile=1k"),
    ],
)
def test_refused_rehearsal_names_the_words_to_type(
    run: Any, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--model", *words, "--world", "4")
    status, out, err = run(*asked)
    assert (status, out) == (2, "")
    changes = err.split("any one of these fits: ")[1].strip().split("; ")
    assert len(changes) >= 3
    if changes[-1].startswith("a device of "):
        changes.pop()

    def planned(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, "measure", planned)
    for change in changes:
        typed = " ".join(re.findall(r"--[\w-]+ \S+|[\w.]+=\w+", change)).split()
        assert run(*asked, *typed)[0] == 130, change


def test_rehearsal_after_ctrl_c_is_one_sentence(run: Any, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, "rehearse", stop)
    status, out, err = run("--model", small, "--length", "128", "--world", "4")
    assert (status, out) == (130, "")
    assert err.startswith("ithaca: rehearse was stopped before its end")


def test_plan_beside_rehearsal_equals_ithaca_plan(tmp_path: Path, typed: Any, monkeypatch: Any) -> None:
    """Here there is no GPU, and the CPU's operators keep more: the plan is the card's all the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("--model", "llama-3.2-1b", "--length", "1M", "--gpus", "8xH100")
    said = json.loads(typed("plan", *words, "--json")[1])
    assert typed("plan", *words)[0] == 0
    run = load_run(Path("run.yaml"))
    machine = read_machine("8xH100", None, None, None, None)
    asked = prediction.RehearsalRequest(run, read_model_config(run.model.name, None), machine)
    with simulated_world(8, 0):
        mesh = init_mesh(sp=8, device="cpu")
        config = apply_stages(asked.config, run.stages, random=True)
        _, planned = prediction.predict(asked, proof.job_of_rank(asked, 0, config, mesh), mesh)
    assert json.loads(json.dumps(asdict(planned.plan))) == said["plan"]
    assert planned.target.device_bytes == pytest.approx(said["memory"]["device_bytes"], rel=1e-3)
    assert planned.target.host_bytes == said["memory"]["host_bytes"]
    # What runs here is compared with what the plan says of that.
    assert planned.memory.device_bytes > 1.2 * planned.target.device_bytes


def test_page_without_timing_has_both_plans(small: str) -> None:
    run = with_one_stage(load_run(None, ["precision=fp32"]), "128", 2, read_model_config(small, None))
    machine = read_machine("2xH100", None, None, None, None)
    asked = prediction.RehearsalRequest(run, read_model_config(small, None), machine, fake=False)
    result = proof.rehearse(asked)
    console = Console(width=140, record=True, file=StringIO())
    console.print(page(asked, replace(result, seconds={})))
    shown = console.export_text()
    assert "plan, on CPU" in shown
    assert "plan, H100" in shown
    said = result.predicted
    last = next(line for line in shown.splitlines() if "reserved by the allocator" in line)
    assert f"{said.memory.device_bytes / 2**20:.2f} MiB" in last
    assert f"{said.target.device_bytes / 2**20:.2f} MiB" in last


def test_stage_of_one_length_has_a_row_for_each_group(small: str) -> None:
    from ithaca.config.schema import read_run

    config = read_model_config(small, None)
    run = with_one_stage(read_run({"mesh": {"sp": 2}}), "4k", 8, config)
    assert (run.stages[0].length, run.stages[0].batch) == (4096, 4)


@pytest.mark.parametrize(("settings", "world"), [([], 8), (["launch.processes=4"], 4), (["mesh.sp=32"], 32)])
def test_run_over_several_nodes_sets_the_world(settings: list[str], world: int) -> None:
    assert _default_world(load_run(None, settings)) == world


def test_model_name_of_the_table_gives_its_config() -> None:
    config = read_model_config("qwen3-4b", None)
    assert (config.model_type, config.num_hidden_layers, config.head_dim) == ("qwen3", 36, 128)
    assert known_config("no such model") is None


@pytest.mark.parametrize("gpus", ["H200", "8xH200", "8 x H200", "16xH200"])
def test_gpus_with_a_number_is_read(gpus: str) -> None:
    """The option has the form of `ithaca plan`."""
    machine = _read_job_machine(gpus, 16 if gpus.startswith("16") else 8, None, None, None)
    assert (machine.device.name, machine.gpus, machine.nodes) == ("H200", 8, 2 if gpus.startswith("16") else 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--world", "4", "--rank", "4"), "ranks count from 0"),
        (("--layers", "few"), "--layers few: use auto, all, or a number"),
        (("--cap", "much"), "is no amount of memory such as 60GiB or 80GB"),
        (("--cap", "80"), "--cap 80: write a unit, such as 80GB"),
        (("--json", "/"), "--json / is a folder: name a file"),
        (("--json", "/proc/x.json"), "--json /proc/x.json cannot be written to"),
        (("--model", "other.json"), "other.json: name a model's folder, or the config.json in it"),
        (("--stage", "9"), "the run has stages 1 to"),
        (("--world", "12"), "more than 8 ranks are whole nodes of 8"),
        (("--gpus", "H900"), "nearest are"),
        (
            ("--gpus", "1xH200", "--world", "2"),
            "--gpus 1xH200 with --world 2: leave the number of cards away, or use --world 1",
        ),
        (("--gpus", "8xH200,H100"), "--gpus 8xH200,H100: write a number and one card"),
        (("missing.yaml",), "does not exist"),
        (("memory.plan=none", "--world", "2"), "has no plan to compare with"),
        (("--length", "far"), "--length"),
    ],
)
def test_mistake_in_options_is_one_line(run: Any, words: tuple[str, ...], message: str) -> None:
    status, _, err = run(*words)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


def test_job_that_does_not_fit_names_the_largest_term(run: Any, small: str) -> None:
    status, _, err = run("memory.budget=300kB", "--model", small, "--length", "64k", "--world", "2")
    assert status == 2
    assert "MiB" in err or "GiB" in err


def test_default_world_is_printed_with_its_option(run: Any, tmp_path: Path) -> None:
    """Four heads over the eight ranks that are usual: two sequence groups, and one row."""
    config = small_config("llama")
    config.num_attention_heads, config.num_key_value_heads = 4, 4
    config.save_pretrained(tmp_path / "four")
    words = (f"model.name={tmp_path / 'four'}", "stages=[{length: 128, steps: 1}]")
    status, _, err = run(*words)
    assert status == 2
    assert "the job has 8 ranks, as neither --world nor the run says how many: --world sets another number" in err
    assert err.rstrip().endswith("use stages.0.batch=2, or --world 4")
    assert run(*words, "--gpus", "8xH100")[2].rstrip().endswith("use stages.0.batch=2, or --gpus 4xH100")
    both = run(*words, "--gpus", "8xH100", "--world", "8")[2]
    assert both.rstrip().endswith("use stages.0.batch=2, or --world 4 --gpus 4xH100")


def test_gpus_option_sets_the_world(run: Any, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_tensors(monkeypatch)
    status, out, err = run("--model", small, "--length", "128", "--gpus", "2xH100", "precision=fp32")
    assert status == 0, err
    assert "rank 0 of 2 " in out
    assert "--world" not in err
