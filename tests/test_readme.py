"""The commands of the README and the examples are run as a new user would run them; every file named exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.tolerances import TRACED_MEMORY

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_files_named_in_the_readme_exist() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(linked) > 4
    missing = [name for name in linked if not (ROOT / name).exists()]
    assert not missing


def test_public_names_in_the_readme_exist() -> None:
    import ithaca

    names = set(re.findall(r"ithaca\.(\w+)\(", README))
    assert {"init_mesh", "parallelize", "causal_loss", "save_pretrained", "count_tokens"} <= names
    assert names <= set(dir(ithaca))


def test_figures_in_the_readme_are_those_measured() -> None:
    import json

    kernels = json.loads((ROOT / "benchmarks/results/kernels.json").read_text())
    ulysses = json.loads((ROOT / "benchmarks/results/ulysses.json").read_text())
    worst_kernel = max(max(row["ratios"].values()) for row in kernels["rows"] if "ratios" in row)
    worst_shared = max(row["worst"] for name in ("shared_2", "shared_4") for row in ulysses[name])
    shares = [row[key] for row in ulysses["pack"] for key in row if key.endswith("_share")]
    assert f"at most {worst_kernel:.2f}x" in README
    assert f"at most {worst_shared:.2f}x" in README
    assert f"{min(shares):.0%}".rstrip("%") + " to 100% of a plain copy" in README
    assert f"| {ulysses['overhead']['ratio'] - 1:.1%} |" in README


def test_the_readmes_steps_are_those_measured() -> None:
    import json

    from benchmarks.step import cell_of, short

    cells = json.loads((ROOT / "benchmarks/results/step.json").read_text())["cells"]
    table = README[README.index("| | 8B, 32K |") : README.index("The longest training steps")]
    columns = [name.strip() for name in table.splitlines()[0].split("|")[2:-1]]
    shown = [line.replace("*", "").split("|")[2:-1] for line in table.splitlines()[2:] if line.startswith("|")]
    said = {(column, text.strip()) for row in shown for column, text in zip(columns, row, strict=True) if text.strip()}
    assert said == {(cell_of(cell), short(cell)) for cell in cells}


def test_the_distance_from_the_floor_is_the_one_measured() -> None:
    import json

    cells = json.loads((ROOT / "benchmarks/results/step.json").read_text())["cells"]
    floor = {(c["model"], c["length"]): c["seconds"] for c in cells if c["system"] == "floor"}
    ratio = {
        (c["model"], c["length"], c["settings"]["budget_gib"]): f"{c['seconds'] / floor[c['model'], c['length']]:.2f}x"
        for c in cells
        if c["system"] == "ithaca"
    }
    told = [("8B", 32_768, 40.0), ("8B", 131_072, 55.0), ("1B", 262_144, 24.0), ("8B", 32_768, 128.0)]
    first, second, third, free = (ratio[one] for one in told)
    said = f"{first}, {second} and {third} the time of attention and matrix products alone, and {free} where memory is free"
    assert said in README


def test_errors_at_the_claimed_lengths_are_those_measured() -> None:
    import json

    def cells_of(name: str) -> list[dict[str, Any]]:
        return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["cells"]

    cells = cells_of("exact")
    claimed = {(cell["model"], cell["length"]) for name in ("step", "longest") for cell in cells_of(name)}
    assert {(cell["model"], cell["length"]) for cell in cells} == claimed
    pairs = [(cell["error"][name], cell["flash_error"][name]) for cell in cells for name in cell["error"]]
    worst, ratio = max(own for own, _ in pairs), max(own / flash for own, flash in pairs)
    assert f"| {worst:.2%} of the largest value at most, {ratio:.2f}x FlashAttention's |" in README
    assert f"| within {max(cell['loss_error']['loss'] for cell in cells):.1e} |" in README


def test_the_run_shown_is_the_one_measured() -> None:
    import json

    found = json.loads((ROOT / "benchmarks/results/training.json").read_text())
    run, page = found["run"], " ".join((ROOT / "docs/train.md").read_text().split())
    losses, middle = [step["loss"] for step in run["taken"]], run["median"]
    speed, share = f"{middle['tokens_per_second']:,.0f} tokens/s", f"{middle['utilisation']:.1%}"
    assert len(losses) >= 50
    assert f"| {speed}, {share} utilisation |" in README
    assert f"{len(losses)} steps at {run['length']:,} tokens: loss {losses[0]:.2f} to {losses[-1]:.2f}, {speed}" in page
    assert f"{share} of the card's peak, {run['memory_gib']['peak']:.1f} GiB allocated" in page
    assert f"adds {found['overhead']['overhead']:.1%};" in page
    assert f"a sixth of a second a step | {found['overhead']['overhead']:.1%} |" in README
    assert f"divides too it adds {found['overhead']['outside']:.1%}." in page
    apart = [one["between"] for one in found["overhead"]["rounds"]]
    assert f"clock {found['overhead']['between']:.1%} of its steps pass outside forward, backward and optimizer" in page
    assert {f"{share:.1%}" for share in apart} == {f"{found['overhead']['between']:.1%}"}
    assert max(found["overhead"][kind] for kind in ("overhead", "outside", "between")) < 0.02
    cold, busy = found["overhead_at_start"], found["overhead_on_a_slow_host"]
    slower, slow = (other["bare_s"] / found["overhead"]["bare_s"] - 1 for other in (cold, busy))
    assert (
        f"the bare loop took {slower:.0%} longer, it was {cold['overhead']:.1%}, and {cold['outside']:.1%} of" in page
    )
    assert f"where it took {slow:.0%} longer, {busy['overhead']:.1%} and {busy['outside']:.1%}, the rounds" in page
    middle = found["run_on_a_slow_host"]["median"]
    assert f"uneven that day: {middle['tokens_per_second']:,.0f} tokens/s, {middle['utilisation']:.1%}." in page


def test_what_is_said_of_rehearsals_is_in_their_file() -> None:
    import json

    cells = json.loads((ROOT / "benchmarks/results/rehearsals.json").read_text())["cells"]
    [whole] = [c for c in cells if c["group"] == "whole"]
    planned = [c for c in cells if c["group"] == "plan"]
    assert f"| {whole['step_s']:.1f} s a step, {whole['reserved'] / 1e9:.1f} GB reserved |" in README
    memory, time = (max(abs(c[error]) for c in planned) for error in ("memory_error", "time_error"))
    assert f"against {len(planned)} rehearsals" in README
    assert f"| memory within {memory:.1%}, time within {time:.1%} |" in README


def test_the_losses_shown_are_those_measured() -> None:
    import json

    from benchmarks.losses import table

    result = json.loads((ROOT / "benchmarks/results/losses.json").read_text())
    assert table(result) in (ROOT / "docs/design.md").read_text()
    seconds = {(row["shape"], row["system"]): row["seconds"] for row in result["rows"]}
    assert {min((s, name) for (shape, name), s in seconds.items() if shape == at)[1] for at, _ in seconds} == {"ithaca"}


def test_the_longest_steps_are_those_measured() -> None:
    import json

    from benchmarks.longest import derived, table
    from benchmarks.step import show_length

    result = json.loads((ROOT / "benchmarks/results/longest.json").read_text())
    made = [[word.strip() for word in row.split("|")[1:-1]] for row in table(result).splitlines()[2:]]
    shown = README[README.index("The longest training steps") : README.index("On a card of 24 GiB")]
    rows = [[word.strip() for word in row.split("|")[1:-1]] for row in shown.splitlines() if row.startswith("| ")][1:]
    said = {(row[0].split(",")[0], show_length(int(row[1].replace(",", ""))), *row[2:]) for row in rows}
    assert said == {(row[0], row[1], row[2], row[4], row[5]) for row in made if "layer" not in row[0]}
    whole = [cell for cell in result["cells"] if "whole" not in cell]
    assert {(cell["model"], cell["length"]) for cell in whole} == {("8B", 524_288), ("1B", 1_048_576)}
    told = [cell for cell in whole if "host_budget_gib" in cell["settings"]]
    assert [cell["model"] for cell in told] == ["8B"]
    assert f'host_budget="{told[0]["settings"]["host_budget_gib"]:.0f}GiB"' in shown
    assert " 4 recompute;" in told[0]["plan"]
    assert "four layers only" in shown
    assert told[0]["pinned_gib"] <= told[0]["settings"]["host_budget_gib"]
    assert max(cell["host_gib"] for cell in whole) < 125
    # The others took their share of the 128 GiB.
    assert max(cell["pinned_gib"] for cell in [*whole, *derived(result)] if cell not in told) < 96


def test_memory_grows_by_the_same_amount_for_every_token() -> None:
    import json
    from itertools import pairwise

    cells = json.loads((ROOT / "benchmarks/results/lengths.json").read_text())["cells"]
    # From where attention's backward takes more than a tile of the loss.
    points = sorted((cell["length"], cell["allocated_gib"]) for cell in cells if cell["length"] >= 32 * 1024)
    first, *rest = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(points)]
    assert rest
    assert rest == pytest.approx([first] * len(rest), rel=TRACED_MEMORY)


def test_the_reach_said_is_the_one_measured() -> None:
    import json

    from benchmarks.reach import TIMES

    [cell] = json.loads((ROOT / "benchmarks/results/reach.json").read_text())["cells"]
    plain, own = cell["transformers"], cell["ithaca"]
    assert own["outcome"] == "done"
    assert own["tokens"] == TIMES * plain["tokens"]
    said = README[README.index("On a card of") : README.index("[reach.json]")]
    assert f"card of {cell['settings']['card_gib']:g} GiB" in said
    assert f"{plain['tokens']:,} tokens, in {plain['allocated_gib']:.1f} GiB" in said
    assert f"{own['tokens']:,}, four times as long, in {own['allocated_gib']:.1f} GiB" in said
    assert f"{own['seconds']:.1f} s a step" in said


def test_the_plan_shown_is_the_plan_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from ithaca.cli import app

    monkeypatch.chdir(tmp_path)
    (command, shown) = re.findall(r"^\$ ithaca (plan .+?)\n(.+?)```", README, re.M | re.S)[0]
    made = CliRunner().invoke(app, command.split(), catch_exceptions=False).stdout
    lines = {" ".join(line.split()) for line in made.splitlines()}
    assert {" ".join(line.split()) for line in shown.strip().splitlines()} <= lines


@pytest.mark.slow
def test_the_line_that_shows_the_memory_plan_shows_it(tmp_path: Path) -> None:
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
def test_torchrun_commands_run(command: str, tmp_path: Path) -> None:
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
