"""`ithaca plan` as a user runs it: what it says, what it writes, and how it refuses."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ithaca.cli.plan_inputs import read_machine
from ithaca.config.schema import load_run
from ithaca.planning.machine.calibrated import Measured, write_measured
from ithaca.planning.machine.hardware import DEVICES, AttentionSpeed
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.planning.search.phrases import show_length as shown_length
from tests.planning.models import LLAMA_8B

BASE = ("--model", "qwen3-8b", "--length", "1M", "--gpus", "8xH100")


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def run(typed: Any) -> Any:
    return partial(typed, "plan")


def test_the_page_says_all_of_it(run: Any) -> None:
    status, out, _ = run(*BASE, "--tokens", "2B", "--price", "2.5", "--host-memory", "1T", "--target-tok-s", "10000")
    assert status == 0
    for said in (
        "Qwen/Qwen3-8B, 8.19 B parameters", "1,048,576 tokens", "dp=1, sp=8", "1,000 GB of host memory",
        "adamw, fp32 weights, bf16 computing", "device memory", "optimizer state", "25% left free", "host memory",
        "saved tensors, pinned", "attention, backward", "tokens/s", "of the card's peak", "GPU-hours", "data sheets",
        "longest that fits", "one more GPU", "twice the host memory", "+mesh  = ithaca.init_mesh(sp=8)",
        "10,000 tokens/s: --gpus 8xH100 --nodes", "torchrun --nproc-per-node 8", "ithaca train run.yaml",
    ):  # fmt: skip
        assert said in out, said


def test_the_run_is_the_plans(run: Any) -> None:
    assert run(*BASE, "--tokens", "2B")[0] == 0
    written = load_run("run.yaml")
    assert (written.mesh.sp, written.mesh.ring, written.stages[0].length) == (8, 1, 2**20)
    assert (written.precision, written.optimizer.name, written.stages[0].tokens) == ("mixed", "adamw", 2 * 10**9)
    assert (written.model.name, written.launch.processes, written.memory.budget) == ("Qwen/Qwen3-8B", 8, None)
    # 40,960 positions were trained, and no more are wanted than the length.
    assert written.stages[0].rope is not None
    assert (written.stages[0].rope.kind, written.stages[0].rope.factor) == ("yarn", 25.6)


def test_a_scaling_is_replaced_over_what_it_was_over(run: Any) -> None:
    """Llama 3.1 reaches 131,072 positions by scaling 8,192."""
    assert run("--model", "llama-3.1-8b", "--length", "1M", "--gpus", "8xH100")[0] == 0
    rope = load_run("run.yaml").stages[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.original) == ("yarn", 128, 8192)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("someone/Qwen3-8B", "someone/Qwen3-8B"),
        ("Qwen3-8B-Base", "Qwen/Qwen3-8B-Base"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("llama31-8b", "meta-llama/Llama-3.1-8B"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.3"),
        ("gemma-3-4b-it", "google/gemma-3-4b-it"),
    ],
)
def test_a_run_names_the_model_that_was_asked_for(run: Any, asked: str, named: str) -> None:
    assert run("--model", asked, "--length", "32k", "--gpus", "8xH100")[0] == 0
    assert load_run("run.yaml").model.name == named


@pytest.mark.parametrize("gpus", ["8xH100", "8 x H100", "8 H100", "8\u00d7H100", "8*h100"])
def test_cards_are_counted_however_they_are_written(run: Any, gpus: str) -> None:
    status, out, _ = run("--model", "qwen3-8b", "--length", "32k", "--gpus", gpus)
    assert status == 0
    assert "8xH100, 1,600 GB" in out


def test_a_file_of_the_users_is_left_alone(run: Any) -> None:
    Path("run.yaml").write_text("seed: 3\n")
    status, out, _ = run(*BASE)
    assert status == 0
    assert "was left alone" in out
    assert Path("run.yaml").read_text() == "seed: 3\n"
    assert "other.yaml: the run" in run(*BASE, "--write", "other.yaml")[1]
    # Its own may be written again.
    assert "other.yaml: the run" in run(*BASE, "--write", "other.yaml")[1]
    assert run("--model", "qwen3-8b", "--length", "64k", "--write", "-")[0] == 0
    assert sorted(path.name for path in Path().glob("*.yaml")) == ["other.yaml", "run.yaml"]


def test_settings_reach_the_run_and_the_script(run: Any) -> None:
    words = (
        "--model",
        "llama-3.1-8b",
        "--length",
        "256k",
        "--gpus",
        "4xA100-80GB",
        "--headroom",
        "0.1",
        "--batch",
        "4",
    )
    _, out, _ = run(*words, "--tune", "lora", "--lora-rank", "8", "--sp", "4")
    written = load_run("run.yaml")
    assert written.lora is not None
    assert (written.lora.rank, written.precision, written.mesh.sp, written.stages[0].batch) == (8, "bf16", 4, 4)
    assert written.memory.budget == int(0.9 * int(79.2 * 2**30))
    assert f"memory_budget={written.memory.budget}" in out
    assert "dtype=torch.bfloat16" in out
    assert "4 rows a step" in out


def test_more_headroom_reaches_the_share_of_the_host(run: Any) -> None:
    words = ("--model", "llama-3.1-8b", "--length", "1M", "--gpus", "8xH100", "--host-memory", "600GB")
    status, out, _ = run(*words, "--headroom", "0.4")
    assert status == 0
    assert load_run("run.yaml").memory.host_budget == int(0.6 * 600e9 / 8)
    assert "host_budget=45000000000" in out
    status, out, _ = run(*words, "--headroom", "0.1", "--write", "less.yaml")
    assert status == 0
    assert load_run("less.yaml").memory.host_budget is None
    assert "host_budget" not in out


def test_a_host_may_be_left_less_than_a_quarter(run: Any) -> None:
    """As the 8B was measured at 512K: with more of the host fewer layers recompute attention."""
    words = ("--model", "llama-3.1-8b", "--length", "512k", "--gpus", "1xH200", "--host-memory", "125GiB")
    words += ("--optimizer", "adamw8bit", "--precision", "bf16", "--headroom", "0.07", "--json")
    again = []
    for more in ((), ("--host-headroom", "0.15")):
        status, out, err = run(*words, *more)
        assert status == 0, err
        again.append(json.loads(out)["plan"]["layers"].count("recompute"))
    assert again[1] < again[0]
    words = ("--model", "llama-3.1-8b", "--length", "1M", "--gpus", "8xH100", "--host-memory", "600GB")
    status, out, _ = run(*words, "--host-headroom", "0.1")
    assert status == 0
    assert load_run("run.yaml").memory.host_budget == int(0.9 * 600e9 / 8)
    assert "host_budget=67500000000" in out
    assert "10% left free" in out


def test_json_has_the_whole_plan(run: Any) -> None:
    status, out, _ = run(*BASE, "--json")
    assert status == 0
    said = json.loads(out)
    assert said["degrees"] == {"dp": 1, "ring": 1, "sp": 8}
    plan = MemoryPlan(
        **{**said["plan"], "layers": tuple(said["plan"]["layers"]), "offload": tuple(said["plan"]["offload"])}
    )
    assert len(plan.layers) == 36
    terms = said["memory"]["terms"]
    assert (
        sum(term["device_bytes"] for term in terms) == said["memory"]["device_bytes"] <= said["memory"]["device_budget"]
    )
    assert sum(term["seconds"] for term in said["time"]["terms"]) == pytest.approx(said["time"]["seconds"])
    assert said["time"]["tokens_per_second"] == pytest.approx(2**20 / said["time"]["seconds"])
    assert not Path("run.yaml").exists()


def test_the_longest_length(run: Any) -> None:
    status, out, _ = run("--model", "llama-3.2-1b", "--gpus", "1xA100-40GB", "--length", "max", "--json")
    assert status == 0
    longest = json.loads(out)["length"]
    assert longest > 128 * 1024
    assert run("--model", "llama-3.2-1b", "--gpus", "1xA100-40GB", "--length", str(longest), "--write", "-")[0] == 0
    status, _, err = run("--model", "llama-3.2-1b", "--gpus", "1xA100-40GB", "--length", str(int(1.03 * longest)))
    assert status == 2
    assert "any one of these fits" in err


def test_compare_tables_every_cut(run: Any) -> None:
    _, out, _ = run(*BASE, "--compare", "--write", "-")
    table = out[out.index("dp  ring  sp") :]
    rows = [line.split() for line in table.splitlines()[1:8]]
    assert [tuple(map(int, row[:3])) for row in rows if row[1] == "1"] == [(8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8)]
    assert all("not built yet" in " ".join(row) for row in rows if row[1] != "1")
    assert "Every mesh of 8xH100, with adamw, fp32 weights, bf16 computing" in out
    assert "Ulysses (sp) as far as it goes: up to 32 ranks" in out
    assert "ring attention is not built yet" in " ".join(out.split())


@pytest.mark.parametrize(
    "words",
    [
        BASE,
        # As long as it gets, and between two steps of the search.
        ("--model", "qwen3-8b", "--length", "max", "--gpus", "4xA100-80GB"),
        ("--model", "qwen3-8b", "--length", "1000001", "--gpus", "8xH100"),
        # The fastest has two rows a step and is not the one that is chosen; copies of the weights in nodes.
        ("--model", "qwen3-8b", "--length", "1M", "--gpus", "8xH200"),
        ("--model", "llama-3.2-1b", "--length", "32k", "--gpus", "8xH100", "--nodes", "2", "--network", "Ethernet 25G"),
        # Some GPUs idle.
        ("--model", "qwen3-8b", "--length", "3M", "--gpus", "8xH100", "--nodes", "5"),
    ],
)
def test_what_is_compared_is_what_is_planned(run: Any, words: tuple[str, ...]) -> None:
    said = json.loads(run(*words, "--compare", "--json")[1])
    [chosen] = [row for row in said["comparison"] if row["chosen"]]
    assert chosen["degrees"] == said["degrees"]
    assert chosen["longest"] == said["reach"]["longest that fits on this mesh"] >= said["length"]
    assert chosen["tokens_per_second"] == said["time"]["tokens_per_second"]
    assert chosen["seconds"] == said["time"]["seconds"]
    assert chosen["device_bytes"] == said["memory"]["device_bytes"]
    for row in said["comparison"]:
        assert (row["seconds"] is None) == (row["longest"] < said["length"])
    fastest = max(row["tokens_per_second"] or 0 for row in said["comparison"] if row["built"])
    assert chosen["tokens_per_second"] >= 0.99 * fastest
    _, out, _ = run(*words, "--compare", "--write", "-")
    shown = next(line.split() for line in out.splitlines() if line.rstrip().endswith("chosen"))
    assert f"{said['time']['tokens_per_second']:,.0f}" in shown
    degrees = said["degrees"]
    assert f"Here at {shown_length(said['length'])}: dp={degrees['dp']}, sp={degrees['sp']}," in out
    assert "comparison" not in json.loads(run(*words, "--json")[1])


def test_the_summary_is_one_page_of_markdown(run: Any) -> None:
    assert run(*BASE, "--spec", "docs/spec.md", "--write", "-")[0] == 0
    text = Path("docs/spec.md").read_text()
    assert text.startswith("# Qwen/Qwen3-8B at 1,048,576 tokens on 8xH100\n")
    assert len(text.splitlines()) < 80
    for line in text.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)
            assert len(cells) in (4, 6), line


def test_a_config_of_ones_own(run: Any) -> None:
    Path("mine").mkdir()
    Path("mine/config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 8}))
    for name in ("mine", "mine/config.json"):
        _, out, _ = run("--model", name, "--length", "32k", "--gpus", "2xH100", "--write", f"{len(name)}.yaml")
        assert "2.80 B parameters" in out
        assert load_run(f"{len(name)}.yaml").model.name == "mine"


def test_more_than_a_node_is_several(run: Any) -> None:
    said = json.loads(run("--model", "llama-3.1-70b", "--gpus", "32xH100", "--json")[1])
    assert (said["machine"]["gpus"], said["machine"]["nodes"]) == (8, 4)
    said = json.loads(run("--model", "llama-3.1-8b", "--gpus", "8xH100", "--nodes", "2", "--json")[1])
    assert said["degrees"]["dp"] * said["degrees"]["sp"] == 16


def test_a_calibration_counts(run: Any, tmp_path: Path) -> None:
    words = ("--model", "llama-3.1-8b", "--length", "64k", "--gpus", "8xH100", "--json")
    before = json.loads(run(*words)[1])
    speeds = (AttentionSpeed(128, 65_536, 100.0, 100.0),)
    file = tmp_path / "cache" / "ithaca" / "calibration.json"
    write_measured(file, Measured("NVIDIA H100 80GB HBM3", 85 * 10**9, 600.0, speeds, 2900.0, 50.0, "2.11.0"))
    after = json.loads(run(*words)[1])
    assert (before["machine"]["measured"], after["machine"]["measured"]) == (False, True)
    assert after["time"]["seconds"] > 1.5 * before["time"]["seconds"]
    file.write_text("[]")
    assert run(*words)[0] == 2


def test_a_gpt2_is_planned_as_far_as_its_positions_go(run: Any) -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    Path("config.json").write_text(json.dumps({**config, "n_inner": None, "attn_pdrop": 0.1}))
    words = ("--model", "config.json", "--gpus", "2xH100", "--write", "-", "--length")
    status, out, _ = run(*words, "1k")
    assert status == 0
    assert "0.12 B parameters" in out
    assert "attn_pdrop is 0.1: attention dropout is not exact over ranks, train with model.config.attn_pdrop=0" in out
    assert "exactness" not in out
    said = json.loads(run(*words, "max", "--json")[1])
    assert {said["length"], *said["reach"].values()} == {1024}
    status, _, err = run(*words, "2k")
    assert status == 2
    assert "gpt2 has learned positions up to 1,024, which no rope stretches: use --length 1024" in err


def test_of_a_model_that_sees_images_the_text_model_is_planned(run: Any) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}, "vision_config": {}}
    Path("config.json").write_text(json.dumps(config))
    for name in ("config.json", "gemma-3-4b-it"):
        status, out, _ = run("--model", name, "--write", "-")
        assert status == 0
        assert "3.88 B parameters" in out
        assert "text only    the text model inside gemma3 is planned, and nothing else that it has" in out
        assert "exactness    gemma3: it takes images" in out
    assert "text only" not in run("--model", "gemma-3-1b-pt", "--write", "-")[1]


def test_architectures_that_are_not_exact_are_named(run: Any) -> None:
    Path("config.json").write_text(json.dumps({**LLAMA_8B, "model_type": "mamba2"}))
    assert "exactness    mamba2: " in run("--model", "config.json", "--write", "-")[1]
    Path("config.json").write_text(json.dumps({**LLAMA_8B, "model_type": "never_heard_of"}))
    status, _, err = run("--model", "config.json", "--write", "-")
    assert (status, err.count("\n")) == (2, 1)
    assert "its model_type is 'never_heard_of', which transformers has no causal language model for" in err
    assert "exactness" not in run(*BASE, "--write", "-")[1]


def test_every_card_of_the_table_can_be_named() -> None:
    for device in DEVICES:
        assert read_machine(f"8x{device.name}", None, None, None, None).device.name == device.name


def test_a_file_that_is_no_text_is_left_alone(run: Any) -> None:
    Path("run.yaml").write_bytes(b"\xff\xfe")
    status, out, _ = run("--model", "qwen3-8b")
    assert (status, Path("run.yaml").read_bytes()) == (0, b"\xff\xfe")
    assert "says something else and was left alone" in out


def test_a_run_over_nodes_says_how_to_rehearse_all_of_it(run: Any) -> None:
    """The run itself says what one node starts: rehearsed so, it would be another, smaller job."""
    _, out, _ = run("--model", "llama-3.1-8b", "--length", "128k", "--nodes", "4")
    said = "ithaca rehearse run.yaml --gpus H100 --world 32"
    assert said in out
    assert said in Path("run.yaml").read_text().splitlines()[1]
    assert "--world" not in run("--model", "llama-3.1-8b", "--write", "one.yaml")[1]


def test_lines_to_be_copied_are_whole_on_a_narrow_page(run: Any) -> None:
    _, out, _ = run("--model", "llama-3.1-8b", "--length", "max", "--nodes", "2")
    assert (
        '  +model = ithaca.parallelize(\n  +    model, mesh, compute_dtype=torch.bfloat16, on_host="everything"\n  +)'
        in out
    )
    assert "HOST:29500 \\\n    --nproc-per-node 8 script.py" in out


def test_a_hub_that_does_not_answer_is_one_reason(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    status, _, err = run("--model", "org/qwen3-9b")
    assert status == 2
    assert "no known model, and the hub cannot be reached" in err
    assert "Qwen/Qwen3-8B" in err


def test_calibrating_without_a_gpu_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, _, err = run("--calibrate")
    assert status == 2
    assert "no GPU here" in err
