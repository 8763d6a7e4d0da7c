"""One training step of Ithaca and of its peers, cell by cell on one GPU: time, memory, and how far from the floor.

    python -m benchmarks.step results/step.json --cells 8B:32K,8B:128K,1B:256K --packages DIR --plot step.png

A step is forward + backward, no optimizer, batch 1, bf16, a Llama-3 shape with random weights. The systems are those
of `benchmarks.peers`; FLOPs and the floor are explained in `benchmarks.floor`. Each cell runs in its own process
under a time limit: wall time between synchronisations (the best of --repeat), peak device memory allocated and
reserved, pinned host memory, model TFLOP/s, loss, gradient norm; or "out of memory" with the peak reached.

The program goes on where it stopped: the JSON is written after every cell, and a cell in it, known by its system,
model, length and settings, is not run again unless --again is given or it had failed. Without --cells nothing runs
and the table and plot are made from the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.floor import SHAPES
from benchmarks.kernels import command_line
from benchmarks.peers import ALST, SYSTEMS
from benchmarks.stamps import mark, save
from ithaca.cli.process import ALLOCATOR_VARIABLES, EXPANDABLE

UNITS = {"K": 2**10, "M": 2**20}
SETTLED = ("done", "out of memory", "over the limit", "killed")
# Less is not worth starting a process and building a model for.
LEAST_S = 20.0
# What `ithaca` chooses for itself, and ALST recommends; given to all alike.
ALLOCATOR = {ALLOCATOR_VARIABLES[0]: EXPANDABLE}
Cell = dict[str, Any]


def parse_length(text: str) -> int:
    unit = UNITS.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def show_length(length: int) -> str:
    for name, unit in (("M", 2**20), ("K", 2**10)):
        if length % unit == 0:
            return f"{length // unit}{name}"
    return str(length)


def parse_cells(text: str) -> list[tuple[str, int]]:
    """ "8B:32K,1B:256K" -> [("8B", 32768), ("1B", 262144)]."""
    found = []
    for part in filter(None, text.split(",")):
        model, _, length = part.partition(":")
        if model not in SHAPES or not length:
            raise SystemExit(f"--cells {part}: write model:length, the model one of {', '.join(SHAPES)}")
        found.append((model, parse_length(length)))
    return found


def parse_memory(text: str) -> Any:
    """JSON, or a bare word such as auto."""
    return text if text.isalpha() and text != "null" else json.loads(text)


def settings_of(system: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that distinguish this cell from others of the same system, model and length."""
    found: dict[str, Any] = {} if arguments.layers is None else {"layers": arguments.layers}
    if system.startswith("alst"):
        found |= ALST | json.loads(arguments.alst)
    if system == "ithaca":
        found["memory"] = parse_memory(arguments.memory)
        given = {"budget_gib": arguments.budget, "documents": arguments.documents, "kernel": arguments.kernel}
        found |= {name: value for name, value in given.items() if value is not None}
    return found


def key(cell: Cell) -> str:
    return json.dumps([cell[name] for name in ("system", "model", "length", "settings")], sort_keys=True)


def load(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {"runs": [], "cells": []}


def record(result: dict[str, Any], program: str, cell: Cell, got: dict[str, Any]) -> None:
    """Put the cell, stamped, in place of an earlier one; hardware, versions and command are kept once a run."""
    run = {"command": command_line(), "allocator": EXPANDABLE} | got.pop("machine", {})
    if run not in result["runs"]:
        result["runs"].append(run)
    kept = {name: value for name, value in cell.items() if name not in ("again", "gradients")}
    others = [other for other in result["cells"] if key(other) != key(cell)]
    result["cells"] = [*others, kept | got | {"run": result["runs"].index(run)}]
    mark(result, program, kept)


def wanted(arguments: argparse.Namespace, result: dict[str, Any]) -> list[Cell]:
    """The cells asked for that the file does not settle, cell by cell and in it system by system."""
    settled = set() if arguments.again else {key(c) for c in result["cells"] if c["outcome"] in SETTLED}
    cells = [
        {
            "system": system, "model": model, "length": length, "settings": settings_of(system, arguments),
            "warmup": arguments.warmup, "repeat": arguments.repeat, "device": arguments.device,
            "short": 0 if arguments.warmup else min(arguments.short, length),
        }
        for model, length in parse_cells(arguments.cells)
        for system in arguments.systems.split(",")
    ]  # fmt: skip
    return [cell for cell in cells if key(cell) not in settled]


def run_cell(cell: Cell, limit: float, packages: Path | None) -> dict[str, Any]:
    """The cell's result from a process of its own, or how that process ended."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "cell.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(cell))
        extra = ["--packages", str(packages)] if packages else []
        command = [sys.executable, "-m", "benchmarks.peers", str(asked), str(answer), *extra]
        environment = os.environ | ALLOCATOR
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
            # Killed from outside is what running out of host memory looks like.
            ended = "killed" if done.returncode == -9 else "failed", f"status {done.returncode}: {done.stderr[-3000:]}"
        except subprocess.TimeoutExpired:
            ended = "over the limit", f"not done after {limit:.0f} s"
        got = json.loads(answer.read_text()) if answer.exists() else {"outcome": "not done"}
        if got["outcome"] == "not done":
            # A step measured before the end counts; the rest is how it ended.
            got |= {"outcome": "done" if "seconds" in got else ended[0], "error": ended[1]}
        return got


def run_all(cells: list[Cell], result: dict[str, Any], arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    for cell in cells:
        left = arguments.total - (time.monotonic() - started)
        if left < LEAST_S:
            print(f"left for the next run: {name_of(cell)}, {cell_of(cell)}", flush=True)
            continue
        got = run_cell(cell, min(arguments.limit, left), arguments.packages)
        if got["outcome"] == "over the limit" and left < arguments.limit:
            print(f"left for the next run: {name_of(cell)}, {cell_of(cell)}", flush=True)
            continue
        record(result, "step", cell, got)
        save(arguments.file, result)
        print(detail(result["cells"][-1], result["cells"]), flush=True)


def name_of(cell: Cell) -> str:
    """The system, with those of its settings that are not the default."""
    usual = {"memory": "auto"} | ALST
    odd = [f"{name}={json.dumps(v)}" for name, v in cell["settings"].items() if usual.get(name) != v]
    return ", ".join([cell["system"], *odd])


def cell_of(cell: Cell) -> str:
    return f"{cell['model']}, {show_length(cell['length'])}"


def short(cell: Cell) -> str:
    """Return a cell of the table: "4.8 s, 39.1 GiB"."""
    peak = cell.get("allocated_gib")
    if cell["outcome"] == "out of memory":
        return "out of memory" + (f" (at {peak:.1f} GiB)" if peak else "")
    if cell["outcome"] != "done":
        return cell["outcome"]
    seconds = cell["seconds"]
    spent = f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
    return spent + (f", {peak:.1f} GiB" if peak else "")


def detail(cell: Cell, cells: list[Cell]) -> str:
    """One line with all there is to say, the ratio to the floor and to the plain model's loss included."""
    parts = [f"{name_of(cell)}, {cell_of(cell)}: {short(cell)}"]
    units = {"reserved_gib": "GiB reserved", "pinned_gib": "GiB pinned", "model_tflops": "TFLOP/s"}
    parts += [f"{cell[name]:.1f} {unit}" for name, unit in units.items() if name in cell]
    bare = next((c for c in cells if c["system"] == "floor" and cell_of(c) == cell_of(cell) and "seconds" in c), None)
    if bare and "seconds" in cell and cell["system"] != "floor" and same_layers(bare, cell):
        parts.append(f"{cell['seconds'] / bare['seconds']:.2f}x the floor")
    parts += [f"{name.replace('_', ' ')} {cell[name]:.5f}" for name in ("loss", "gradient_norm") if name in cell]
    if "error" in cell:
        parts.append(cell["error"].strip().splitlines()[-1][:300])
    return ", ".join(parts)


def same_layers(one: Cell, other: Cell) -> bool:
    return one["settings"].get("layers") == other["settings"].get("layers")


def table(cells: list[Cell]) -> str:
    """Markdown: systems down, cells across, in the order of `SYSTEMS` and of growing size."""
    columns = sorted({(list(SHAPES).index(c["model"]), c["length"], cell_of(c)) for c in cells})
    names = sorted({(SYSTEMS.index(c["system"]), name_of(c)) for c in cells})
    found = {(name_of(c), cell_of(c)): short(c) for c in cells}
    rows = [["", *(column[-1] for column in columns)]]
    rows += [[name, *(found.get((name, column[-1]), "") for column in columns)] for _, name in names]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def curves(cells: list[Cell]) -> dict[str, list[Cell]]:
    """Systems with three or more lengths of one model, by length."""
    groups: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda c: c["length"]):
        if cell["outcome"] == "done":
            groups.setdefault(f"{name_of(cell)}, {cell['model']}", []).append(cell)
    return {name: group for name, group in groups.items() if len(group) > 2}


def plot(cells: list[Cell], file: Path) -> None:
    """Bars, a column a cell, time above memory; of a file with many lengths and one system, both against length."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    along = curves(cells)
    if along and max(Counter(cell_of(c) for c in cells).values()) == 1:
        return plot_lengths(along, file)
    compared = Counter(cell_of(c) for c in sorted(cells, key=lambda c: (c["model"], c["length"])))
    places = list(compared)
    columns = len(places)
    figure, axes = plt.subplots(2, columns, figsize=(4.2 * columns, 5.2), squeeze=False)
    for column, place in enumerate(places):
        here = [c for c in cells if cell_of(c) == place and c["outcome"] == "done"]
        here.sort(key=lambda c: (SYSTEMS.index(c["system"]), name_of(c)), reverse=True)
        _bars(axes[0][column], here, "seconds", f"{place}: seconds")
        _bars(axes[1][column], here, "allocated_gib", "GiB allocated")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def plot_lengths(along: dict[str, list[Cell]], file: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for group in along.values():
        lengths = [c["length"] / 1024 for c in group]
        name = f"{group[0]['model']}: {group[0].get('plan', group[0]['system'])}"
        axes[0].plot(lengths, [c["seconds"] / c["length"] * 1e6 for c in group], marker="o", label=name)
        axes[1].plot(lengths, [c.get("allocated_gib", 0) for c in group], marker="o", label=name)
    for axis, title in zip(axes, ("microseconds a token", "GiB allocated at the peak"), strict=True):
        axis.set(title=title, xlabel="thousands (1,024) of tokens", xlim=(0, None), ylim=(0, None))
        axis.legend(fontsize="x-small", loc="lower right")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _bars(axis: Any, cells: list[Cell], field: str, title: str) -> None:
    cells = [c for c in cells if field in c]
    colours = {"ithaca": "tab:blue", "floor": "lightgray"}
    names = [name_of(c).replace("budget_gib=", "").replace(".0", " GiB") for c in cells]
    bars = axis.barh(names, [c[field] for c in cells], color=[colours.get(c["system"], "tab:orange") for c in cells])
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize="small")
    axis.margins(x=0.18)
    axis.set_title(title, fontsize="medium")
    axis.tick_params(labelsize="small")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the JSON, read and written")
    parser.add_argument("--cells", default="", help="model:length, separated by commas: 8B:32K,1B:256K")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="separated by commas (default: all)")
    parser.add_argument("--memory", default="auto", help='ithaca: "auto", a JSON object, or null to leave it away')
    parser.add_argument("--budget", type=float, metavar="GiB", help="ithaca: memory_budget")
    parser.add_argument("--documents", help="ithaca: pack rows of documents of so many tokens each, or log-normal")
    parser.add_argument("--kernel", help="ithaca: the attention kernel (default: the fastest)")
    parser.add_argument("--alst", default="{}", help=f"changes to ALST's settings, JSON (default: {json.dumps(ALST)})")
    parser.add_argument("--layers", type=int, help="build the model with so many layers only")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the timed ones, at the same length")
    parser.add_argument("--repeat", type=int, default=1, help="timed steps")
    parser.add_argument("--short", type=int, default=4096, help="without --warmup: one step this short (0: none)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a cell")
    parser.add_argument(
        "--total", type=float, default=float("inf"), help="seconds for all; the rest waits for a next run"
    )
    parser.add_argument("--again", action="store_true", help="also run the cells that the file has")
    parser.add_argument(
        "--packages", type=Path, help="a folder with peers that are not installed: see benchmarks.peers"
    )
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--plot", type=Path, help="also draw the cells, into this file")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.systems.split(",")) - set(SYSTEMS))
    if unknown:
        parser.error(f"--systems {unknown[0]}: choose among {', '.join(SYSTEMS)}")
    result = load(arguments.file)
    run_all(wanted(arguments, result), result, arguments)
    if arguments.plot and result["cells"]:
        plot(result["cells"], arguments.plot)
    print("\n".join(detail(cell, result["cells"]) for cell in result["cells"]))
    print(table(result["cells"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
