"""Reach: the longest row under plain transformers, and Ithaca at four times that length on the same card.

    python -m benchmarks.reach results/reach.json --cells 1B:24,1B:80,8B:139

A cell is a Llama-3 shape with random weights and the GiB of a card, to which a larger device is limited. Steps are whole:
forward, backward, AdamW, batch 1, bf16. First a search finds the longest row that transformers trains (SDPA, gradient
checkpointing, torch's fused AdamW), to a sixteenth. Then Ithaca takes one step at four times that length, under the plan
that `parallelize(model, mesh)` makes on such a card: three quarters of its memory. Each half runs in a process of its own.
Without `--cells` the table is made from the file.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import longest
from benchmarks.floor import SHAPES, build_model
from benchmarks.peers import GIB, about, checkpointed_step, memory, outcome_of
from benchmarks.stamps import save
from benchmarks.step import ALLOCATOR, Cell, load, record
from ithaca.models.planner.memory_planner import SHARE

TIMES = 4
FIRST, UNIT = 2048, 1024
# No row is tried beyond this: the search is for where memory ends, and on a CPU it does not.
MOST = 2**20


def longest_that(fits: Callable[[int], bool], most: int) -> int:
    """Return the longest length that fits, in units of 1K and to a sixteenth; 0 if not even 2K fit."""
    good, bad = 0, FIRST
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    if not good or bad > most:
        return good
    while bad - good > max(UNIT, good // 16):
        middle = (good + bad) // 2 // UNIT * UNIT
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def hold_to(card_gib: float, device: torch.device) -> None:
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, card_gib * GIB / whole))


def plain(model_name: str, card_gib: float, device_name: str) -> dict[str, Any]:
    """The longest row that transformers trains, with the peak and the time of its last step that fitted."""
    device, shape = torch.device(device_name), SHAPES[model_name]
    hold_to(card_gib, device)
    model = build_model(shape, MOST, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    step, optimizer = checkpointed_step(model), torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, shape.vocab, (1, MOST), generator=torch.Generator().manual_seed(1))
    took: dict[int, dict[str, float]] = {}

    def fits(tokens: int) -> bool:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = longest.clock(device)
        try:
            step(ids[:, :tokens])
            optimizer.step()
            took[tokens] = {"seconds": longest.clock(device) - began} | memory(device)
        except torch.OutOfMemoryError:
            pass
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return tokens in took

    tokens = longest_that(fits, MOST)
    return {"machine": about(device), "tokens": tokens} | took.get(tokens, {})


def longer(model_name: str, card_gib: float, tokens: int, device_name: str) -> dict[str, Any]:
    """Run one step of Ithaca at this length in three quarters of the card; return its outcome."""
    device, last = torch.device(device_name), {}
    hold_to(card_gib, device)
    settings = {"optimizer": "adamw", "budget_gib": SHARE * card_gib, "layers": SHAPES[model_name].layers}
    cell = {"system": "ithaca", "model": model_name, "length": tokens, "settings": settings}
    longest.measured(cell, device, last.update)
    return last


def apart(function: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Run one half in a process of its own, so that it leaves nothing on the device."""
    try:
        with get_context("spawn").Pool(1) as pool:
            return pool.apply(function, given)
    except Exception as error:
        return {"outcome": outcome_of(error), "error": f"{type(error).__name__}: {error}"[:4000]}


def parse(text: str) -> list[tuple[str, float]]:
    """ "1B:24,8B:139" -> [("1B", 24.0), ("8B", 139.0)]."""
    found = []
    for part in filter(None, text.split(",")):
        model, _, card = part.partition(":")
        if model not in SHAPES or not card.replace(".", "", 1).isdigit():
            raise SystemExit(f"--cells {part}: write model:GiB of the card, the model one of {', '.join(SHAPES)}")
        found.append((model, float(card)))
    return found


def table(result: dict[str, Any]) -> str:
    heads = ("model", "card", "transformers reaches", "at", "Ithaca trained", "at", "plan")
    rows: list[tuple[str, ...]] = [heads, ("---",) * len(heads)]
    for cell in sorted(result["cells"], key=lambda c: (c["model"], c["settings"]["card_gib"])):
        reached, own = cell["transformers"], cell["ithaca"]
        done = own.get("outcome") == "done"
        ours = f"{own['tokens']:,}" if done else own.get("outcome", "not run")
        rows.append(
            (
                cell["model"], f"{cell['settings']['card_gib']:g} GiB", f"{reached.get('tokens', 0):,}",
                figures(reached), ours, figures(own) if done else "", own.get("plan", "") if done else "",
            )
        )  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def figures(half: dict[str, Any]) -> str:
    peak = f", {half['allocated_gib']:.1f} GiB" if "allocated_gib" in half else ""
    return f"{half['seconds']:.1f} s{peak}" if "seconds" in half else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the JSON, read and written")
    parser.add_argument("--cells", default="", help="model:GiB of the card, separated by commas")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update(ALLOCATOR)
    result = load(arguments.file)
    for model, card in parse(arguments.cells):
        cell: Cell = {"system": "ithaca", "model": model, "length": 0, "settings": {"card_gib": card}}
        reached = apart(plain, model, card, arguments.device)
        machine = reached.pop("machine", {})
        own: dict[str, Any] = {}
        if reached.get("tokens"):
            own = apart(longer, model, card, TIMES * reached["tokens"], arguments.device)
            own.pop("machine", None)
        # Known by model and card: a row found longer next time is the same cell's.
        record(result, "reach", cell, {"machine": machine, "outcome": "done", "transformers": reached, "ithaca": own})
        save(arguments.file, result)
        print(table(result), flush=True)
    if not arguments.cells:
        print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
