"""Whole training steps, optimizer and all, at the lengths where a device is full.

    python -m benchmarks.longest results/longest.json --cells 8B:512K --optimizer adamw8bit --budget 130

A Llama-3 shape with random weights, batch 1, bf16, on one device: a short step first, which makes the optimizer's state
and compiles, then one step at the length: forward, backward, optimizer. The plan is `memory="auto"`'s for the budget.
The JSON is written after every part, so that a step that is stopped leaves how far it came.

With `--layers N` the model has N layers only, each of which saves attention and input, under the tiles and head groups
of the whole model's plan. The whole model's time is derived from it and marked so: every layer's time, for layers that
the whole plan rebuilds or recomputes also the FLOPs done again at the pace of the forward pass, and the head's time
once, as `--heads` measures it alone (where it has not, the head counts with every layer: "at most"). Memory is then what
the plan says. Without `--cells` the table is made from the file.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.floor import SHAPES, Shape, build_model, config_of, step_flops, synchronize
from benchmarks.peers import GIB, about, host_gib, ithaca_figures, memory, outcome_of
from benchmarks.stamps import mark, save
from benchmarks.step import ALLOCATOR, Cell, load, parse_cells, record, show_length
from ithaca.planning.memory_plan import Job
from ithaca.planning.model.flops import attention_flops, token_flops
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.cost import run_again

SHORT = 8192
# Of the head alone: enough for the device to be busy, and tiles as the plans of long sequences have them.
HEAD_TOKENS, TILE = 65536, 4096


def run(cell: Cell, device: torch.device, keep: Callable[[dict[str, Any]], None]) -> None:
    """One whole step of the cell; `keep` is called after each part of it."""
    import ithaca
    from ithaca.state.optimizer.build import build_optimizer

    settings, length = cell["settings"], cell["length"]
    shape = replace(SHAPES[cell["model"]], layers=settings["layers"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(shape, length, device, dtype)
    mesh = ithaca.init_mesh(sp=1)
    budget, host = (
        None if (gib := settings.get(name)) is None else int(gib * GIB) for name in ("budget_gib", "host_budget_gib")
    )
    result: dict[str, Any] = {"machine": about(device), "outcome": "not done"}
    plan: Any = "auto"
    if shape.layers < SHAPES[cell["model"]].layers:
        result["whole"], plan = part_of_whole(cell, model, mesh, budget, host)
    ithaca.parallelize(
        model, mesh, memory=plan, memory_budget=budget, host_budget=host, optimizer=settings["optimizer"]
    )
    optimizer = build_optimizer(model, settings["optimizer"], lr=1e-5)
    ids = torch.randint(0, shape.vocab, (1, length), generator=torch.Generator().manual_seed(1))
    for tokens in (min(SHORT, length), length):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        marks = [clock(device)]
        loss = ithaca.causal_loss(model, {"input_ids": ids[:, :tokens]}, mesh)
        marks.append(clock(device))
        result |= {"tokens": tokens, "loss": float(loss.detach()), "forward_s": marks[1] - marks[0]} | memory(device)
        keep(result)
        loss.backward()
        marks.append(clock(device))
        result |= {"backward_s": marks[2] - marks[1]} | memory(device)
        keep(result)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(clock(device))
        result |= {"optimizer_s": marks[3] - marks[2], "seconds": marks[3] - marks[0]} | memory(device)
    result |= ithaca_figures(model)
    result["model_tflops"] = step_flops(shape, length) / result["seconds"] / 1e12
    result["host_gib"] = host_gib("VmHWM")
    keep(result | {"outcome": "done"})


def clock(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def head_seconds(shape: Shape, device: torch.device) -> float:
    """Return the seconds that the tiled head and loss take for one token, gradients included."""
    from ithaca.memory.head_loss import LossSpec, head_loss

    dtype, tokens = (torch.bfloat16, HEAD_TOKENS) if device.type == "cuda" else (torch.float32, 64)
    hidden = torch.randn(1, tokens, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, shape.vocab, (1, tokens), device=device)
    took = []
    for _ in range(4):
        hidden.grad = weight.grad = None
        began = clock(device)
        total, *_ = head_loss(hidden, weight, None, targets, TILE, LossSpec(), fuse=device.type == "cuda")
        total.backward()
        took.append(clock(device) - began)
    return min(took) / tokens


def part_of_whole(
    cell: Cell, model: Any, mesh: Any, budget: int | None, host: int | None
) -> tuple[dict[str, Any], Any]:
    """Return the whole model's plan as JSON, and the plan of the few layers that `model` has."""
    from ithaca.models.planner.plan_in_force import AutoMemory, job_of
    from ithaca.models.support import ModelParts
    from ithaca.planning.memory_plan import UNDECIDED
    from ithaca.planning.terms.memory_terms import memory_of
    from ithaca.sequence.layout import SequenceLayout

    job = job_of(model, mesh, "shard", cell["settings"]["optimizer"], fused=True, compute_dtype=None)
    auto = AutoMemory.of(ModelParts.of(model), mesh, job, budget, UNDECIDED, host)
    auto.sizes = whole_sizes(cell)
    plan = auto.plan_for(SequenceLayout.whole_rows(1, cell["length"], mesh.sp))
    assert plan is not None
    needs = memory_of(auto.sizes, auto.job, plan)
    whole = {
        "plan": plan.summary(), "modes": dict(Counter(plan.layers)), "mlp_tile": plan.mlp_tile,
        "allocated_gib": needs.device_bytes / GIB, "pinned_gib": needs.host_bytes / GIB,
    }  # fmt: skip
    few = cell["settings"]["layers"]
    return whole, replace(plan, layers=("save",) * few, offload=(False,) * few)


def whole_sizes(cell: Cell) -> ModelSizes:
    return ModelSizes.from_config(config_of(SHAPES[cell["model"]], cell["length"]).to_dict())


def derived(result: dict[str, Any]) -> list[Cell]:
    """Return whole models' times, derived from runs with fewer layers."""
    found = []
    for cell in (c for c in result["cells"] if c["outcome"] == "done" and "whole" in c):
        whole, sizes, job = cell["whole"], whole_sizes(cell), Job(length=cell["length"])
        few, layer = cell["settings"]["layers"], sizes.layers[0]
        head = result.get("heads", {}).get(cell["model"], {}).get("seconds_per_token", 0.0) * cell["length"]
        one = (cell["seconds"] - head - cell["optimizer_s"]) / few
        work = token_flops(layer, job) + attention_flops(sizes, layer, job)
        second_per_flop = (cell["forward_s"] - head) / few / work
        again = {
            mode: run_again(sizes, job, layer, mode, tiled=whole["mlp_tile"] < cell["length"])
            for mode in ("save", *whole["modes"])
        }
        extra = sum(many * (again[mode] - again["save"]) for mode, many in whole["modes"].items())
        optimizer = cell["optimizer_s"] * sizes.total / replace(sizes, layers=sizes.layers[:few]).total
        seconds = head + len(sizes.layers) * one + extra * second_per_flop + optimizer
        found.append({**cell, "seconds": seconds, "from": few, "at_most": not head} | whole)
    return found


def table(result: dict[str, Any]) -> str:
    """Return Markdown: measured cells, then whole models derived from them."""
    cells = result["cells"]
    heads = ("model", "tokens", "step", "tokens/s", "device", "pinned", "optimizer", "plan")
    rows = [heads, ("---",) * len(heads)]
    for c in sorted(cells, key=lambda c: (c["model"], c["length"], c["settings"]["layers"])):
        rows.append((name_of(c), show_length(c["length"]), *figures(c)))
    for c in derived(result):
        spent, speed, device, pinned, *rest = figures(c)
        spent = f"{'at most ' * c['at_most']}{spent}, derived from {c['from']} layer{'s' * (c['from'] > 1)}"
        rows.append(
            (c["model"], show_length(c["length"]), spent, speed, f"planned {device}", f"planned {pinned}", *rest)
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def name_of(cell: Cell) -> str:
    layers = cell["settings"]["layers"]
    some = f"{cell['model']}, {layers} layer{'s' * (layers > 1)}"
    return cell["model"] if layers == SHAPES[cell["model"]].layers else some


def figures(cell: Cell) -> tuple[str, ...]:
    optimizer = cell["settings"]["optimizer"]
    if cell["outcome"] != "done":
        return cell["outcome"], "", "", "", optimizer, ""
    peak = f"{cell['allocated_gib']:.1f} GiB" if "allocated_gib" in cell else ""
    speed = f"{cell['length'] / cell['seconds']:,.0f}"
    return f"{cell['seconds']:.1f} s", speed, peak, f"{cell['pinned_gib']:.1f} GiB", optimizer, cell["plan"]


def measured(cell: Cell, device: torch.device, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run the cell; return a failure as a result."""
    last: dict[str, Any] = {}

    def note(result: dict[str, Any]) -> None:
        last.update(result)
        keep(dict(result))

    try:
        run(cell, device, note)
    except Exception as error:
        keep(last | memory(device) | {"outcome": outcome_of(error), "error": f"{type(error).__name__}: {error}"[:4000]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the JSON, read and written")
    parser.add_argument("--cells", default="", help="model:length, separated by commas")
    parser.add_argument("--optimizer", default="adamw", help="a name that parallelize takes")
    parser.add_argument("--budget", type=float, metavar="GiB", help="memory_budget (default: parallelize's own)")
    parser.add_argument("--host-budget", type=float, metavar="GiB", help="host_budget (default: parallelize's own)")
    parser.add_argument("--layers", type=int, help="build the model with so many layers only")
    parser.add_argument("--heads", default="", help="models whose head and loss are measured alone, for derived times")
    parser.add_argument("--packages", type=Path, help="a folder with packages that are not installed")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update(ALLOCATOR)
    if arguments.packages:
        sys.path.append(str(arguments.packages.resolve()))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    result = load(arguments.file)
    for model in filter(None, arguments.heads.split(",")):
        device = torch.device(arguments.device)
        measured_head = {"seconds_per_token": head_seconds(SHAPES[model], device), "machine": about(device)}
        result.setdefault("heads", {})[model] = measured_head
        mark(result, "longest", "heads")
        save(arguments.file, result)
    for model, length in parse_cells(arguments.cells):
        settings = {
            "optimizer": arguments.optimizer,
            "budget_gib": arguments.budget,
            "layers": arguments.layers or SHAPES[model].layers,
        }
        if arguments.host_budget is not None:
            settings["host_budget_gib"] = arguments.host_budget
        cell = {"system": "ithaca", "model": model, "length": length, "settings": settings}

        def keep(got: dict[str, Any], cell: Cell = cell) -> None:
            record(result, "longest", cell, got)
            save(arguments.file, result)
            print(
                {key: got.get(key) for key in ("tokens", "outcome", "forward_s", "backward_s", "seconds")}, flush=True
            )

        measured(cell, torch.device(arguments.device), keep)
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
