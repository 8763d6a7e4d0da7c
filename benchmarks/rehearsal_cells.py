"""The cells of `benchmarks.rehearsals`: settings and name of every rehearsal, by group."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.step import parse_length, show_length

Cell = dict[str, Any]
GROUPS = ("plan", "capped", "matched", "scaling", "whole")
MODELS = ("meta-llama/Llama-3.2-1B", "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "experts")
SHAPES = ((1, "32K"), (1, "128K"), (4, "128K"), (8, "512K"), (8, "1M"))
WHOLE = ("Qwen/Qwen3-8B", 8, "1M")
EXPERTS, EXPERT_LAYERS = "Qwen/Qwen3-30B-A3B", 6
BF16 = ("precision=bf16", "optimizer.name=adamw")
MIXED = ("precision=mixed", "optimizer.name=adamw")
# Length: the published peak in GB and tokens/s (Hugging Face's post on Ulysses); at 128K it ran out of memory.
PUBLISHED: dict[str, tuple[float, int | None]] = {
    "8K": (23.4, 3933),
    "32K": (35.0, 7733),
    "64K": (50.5, 13396),
    "96K": (66.0, None),
}
# Length: budget in GB.
CAPPED = {
    "8K": 10.5,
    "32K": 13.0,
    "64K": 16.0,
    "96K": 18.0,
    # Less than could be had: a plan of two kinds of layers, of which few need be run.
    "1M": 49.0,
}
# Of a published peak: what is left to the allocator and to kernels.
MATCHED_SHARE = 0.96


def cell(group: str, model: str, sp: int, length: str, *settings: str, options: tuple[str, ...] = ()) -> Cell:
    return {
        "group": group, "model": model, "sp": sp, "length": parse_length(length),
        "settings": [*settings, f"mesh.sp={sp}"], "options": list(options),
    }  # fmt: skip


def cells_of(group: str) -> list[Cell]:
    """Return the cells of a group: those of one sort together, the quick ones first."""
    if group == "plan":
        return [_planned(model, sp, length) for model in MODELS for sp, length in SHAPES]
    if group == "capped":
        return [_on_80_gb("capped", length, budget, "everything") for length, budget in CAPPED.items()]
    if group == "matched":
        return [_on_80_gb("matched", at, MATCHED_SHARE * peak, "nothing") for at, (peak, _) in PUBLISHED.items()]
    if group == "scaling":
        return [cell("scaling", "Qwen/Qwen3-4B", sp, "128K", *BF16) for sp in (1, 2, 4, 8, 16, 32)]
    if group == "whole":
        return [_whole("whole")]
    raise SystemExit(f"--groups {group}: choose among {', '.join(GROUPS)}")


def _planned(model: str, sp: int, length: str) -> Cell:
    """The whole rank stands for its cell: every layer of it is run, and it need not run twice."""
    return _whole("plan") if (model, sp, length) == WHOLE else cell("plan", model, sp, length, *BF16)


def _whole(group: str) -> Cell:
    settings = (*MIXED, "memory.on_host=everything", "memory.budget=33GB")
    return cell(group, *WHOLE, *settings, options=("--layers", "all"))


def _on_80_gb(group: str, length: str, budget: float, on_host: str) -> Cell:
    settings = (*MIXED, f"memory.on_host={on_host}", f"memory.budget={budget:.1f}GB")
    return cell(group, "Qwen/Qwen3-4B", 4, length, *settings, options=("--cap", "80GB"))


def key(of: Cell) -> str:
    return json.dumps([of["group"], asked(of)])


def asked(of: Cell) -> list[Any]:
    """Return the settings that a cell rehearses; cells of two groups may have the same."""
    return [of[name] for name in ("model", "sp", "length", "settings", "options")]


def sort_of(of: Cell) -> list[Any]:
    """Return the settings that cells of one process share: all but length, budget and mesh."""
    free = ("mesh.", "memory.budget=")
    return [of["model"], [each for each in of["settings"] if not each.startswith(free)], of["options"]]


def name_of(of: Cell) -> str:
    return f"{of['group']}: {short_name(of)}, sp={of['sp']}, {show_length(of['length'])}"


def short_name(of: Cell) -> str:
    if of["model"] == "experts":
        return f"{EXPERTS.rsplit('/', 1)[-1]}, {EXPERT_LAYERS} layers"
    return str(of["model"].rsplit("/", 1)[-1])
