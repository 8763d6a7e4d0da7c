"""The training step of two versions of Ithaca, in turns on one GPU, so that neither gains from its card or its hour.

    git archive 9ed481b ithaca benchmarks | tar x -C old
    python -m benchmarks.versions versions.json --other old --commit 9ed481b --cells 8B:32K@40,8B:128K@55,1B:256K@24

A cell is a model, a length and a budget in GiB; its step is that of `benchmarks.step`. Each version runs
`benchmarks.peers` of its own source tree in processes of its own: this tree, the other, the other, this tree, and so
on for --rounds. The JSON has two cells for each, told apart by "version", with all timed steps; `benchmarks.stale
--carry` takes it as measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.floor import SHAPES
from benchmarks.kernels import command_line
from benchmarks.stamps import HERE, ROOT, mark, name_of, save
from benchmarks.step import ALLOCATOR, load, parse_length
from ithaca.cli.process import EXPANDABLE

Cell = dict[str, Any]


def parse_cells(text: str) -> list[Cell]:
    """ "8B:32K@40" -> the cell of Ithaca's 8B at 32768 tokens with a budget of 40 GiB."""
    found = []
    for part in filter(None, text.split(",")):
        model, _, rest = part.partition(":")
        length, _, budget = rest.partition("@")
        if model not in SHAPES or not length or not budget:
            raise SystemExit(f"--cells {part}: write model:length@GiB, the model one of {', '.join(SHAPES)}")
        settings = {"memory": "auto", "budget_gib": float(budget)}
        found.append({"system": "ithaca", "model": model, "length": parse_length(length), "settings": settings})
    return found


def turns(other: str, rounds: int) -> list[str]:
    """Return who runs when: both versions once a round, the first of a round changing."""
    pair = [HERE, other]
    return [version for number in range(rounds) for version in (pair if number % 2 == 0 else pair[::-1])]


def run_once(tree: Path, cell: Cell, limit: float, packages: Path | None) -> dict[str, Any]:
    """Return the result of a cell in a process that imports everything from `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "cell.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(cell))
        extra = ["--packages", str(packages.resolve())] if packages else []
        # The packages also go into the path: an older version imports some of them before it reads its arguments.
        path = os.pathsep.join([str(tree.resolve()), *extra[1:], os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "benchmarks.peers", str(asked), str(answer), *extra]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, cwd=tree,
                env=os.environ | ALLOCATOR | {"PYTHONPATH": path},
            )  # fmt: skip
            ended = "failed", f"status {done.returncode}: {done.stderr[-3000:]}"
        except subprocess.TimeoutExpired:
            ended = "over the limit", f"not done after {limit:.0f} s"
        got: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {"outcome": "not done"}
        if got["outcome"] == "not done":
            got |= {"outcome": ended[0], "error": ended[1]}
        return got


def merged(cell: Cell, got: dict[str, Any]) -> Cell:
    """Return a version's cell with the steps of another of its processes; the first that failed ends it."""
    if cell.get("outcome", "done") != "done":
        return cell
    steps = [*cell.get("steps_s", []), *got.get("steps_s", [])]
    return cell | got | ({"steps_s": steps, "seconds": min(steps)} if steps else {})


def record(result: dict[str, Any], cell: Cell, got: dict[str, Any]) -> Cell:
    """Add a process's result to its version's cell, stamp it where it is this tree's, and return it."""
    run = {"command": command_line(), "allocator": EXPANDABLE} | got.pop("machine", {})
    if run not in result["runs"]:
        result["runs"].append(run)
    before = next((each for each in result["cells"] if name_of(each) == name_of(cell)), cell)
    done = merged(before, got) | {"run": result["runs"].index(run)}
    result["cells"] = [each for each in result["cells"] if each is not before] + [done]
    if cell["version"] == HERE:
        mark(result, "versions", done)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the JSON, read and written")
    parser.add_argument("--other", type=Path, required=True, help="the source tree of the other version")
    parser.add_argument("--commit", required=True, help="the commit of the other version")
    parser.add_argument("--cells", required=True, help="model:length@GiB, separated by commas")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each version and cell")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the timed ones, at the same length")
    parser.add_argument("--repeat", type=int, default=1, help="timed steps of a process")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a process")
    parser.add_argument("--packages", type=Path, help="a folder with packages that are not installed")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    result = load(arguments.file)
    trees = {HERE: ROOT, arguments.commit: arguments.other}
    for cell in parse_cells(arguments.cells):
        for version in turns(arguments.commit, arguments.rounds):
            given = {"warmup": arguments.warmup, "repeat": arguments.repeat, "device": arguments.device, "short": 0}
            got = run_once(trees[version], cell | given, arguments.limit, arguments.packages)
            done = record(result, cell | {"version": version}, got)
            save(arguments.file, result)
            shown = (name_of(done), *(f"{done.get(name, 0):.5g}" for name in ("seconds", "allocated_gib", "loss")))
            print(*shown, done["outcome"], done.get("error", "").strip()[-300:], flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
