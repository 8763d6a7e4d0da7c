"""Command line of the survey: a verdict on every causal-LM type of the installed transformers.

    python -m tools.survey.survey [--facts] [--kinds llama,bloom] [--write]

Prints a line for each type, in about a quarter of an hour on two cores. `--write` writes the verdicts into
`ithaca/planning/model/architectures.json` (with `--kinds`: these rows alone) and generates `docs/architectures.md`.
`--facts` measures facts and structures instead, which `parallelize` and plans read, and leaves the verdicts unchanged:
three minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

from ithaca.planning.model.architectures import verdicts
from tools.survey.judge import TOLERANCE, Row, judge
from tools.survey.measured import facts_row
from tools.survey.page import page
from tools.survey.run import Measured, Ranks
from tools.survey.stated import stated_kinds
from tools.survey.static import aliases, kinds, read_source
from tools.survey.structures import structures

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "ithaca" / "planning" / "model" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
WORLDS = (2, 4)
PROCESSES = 2


class Fleet:
    """One set of ranks for each world size, started at its first measurement."""

    def __init__(self) -> None:
        self.ranks = {world: Ranks(world) for world in WORLDS}

    def measure(self, world: int, kind: str, *, memory: bool = False, **overrides: Any) -> Measured:
        return self.ranks[world].measure(kind, memory=memory, **overrides)

    def stop(self) -> None:
        for ranks in self.ranks.values():
            ranks.stop()


def survey(chosen: list[str]) -> dict[str, Row]:
    """Return the rows of the chosen types and of their aliases."""
    rows: dict[str, Row] = {}
    fleet = Fleet()
    try:
        for number, kind in enumerate(chosen, 1):
            started = time.monotonic()
            row = judge(read_source(kind), fleet.measure, WORLDS)
            rows |= dict.fromkeys((kind, *aliases(kind)), row)
            shown = f"off by {row['worst']:.0e} at most" if row["verdict"] == "exact" else row["reason"]
            shown += f", memory: {row['memory']}" if "memory" in row else ""
            seconds = time.monotonic() - started
            print(f"[{number}/{len(chosen)}] {kind}: {row['verdict']}, {shown} ({seconds:.1f} s)", flush=True)
    finally:
        fleet.stop()
    return rows


def facts(chosen: list[str]) -> dict[str, Row]:
    """Return facts of every type, and structures of the chosen exact ones, by type."""
    others = set(kinds()) - set(chosen)
    rows: dict[str, Row] = {kind: {"facts": row} for kind in stated_kinds() - others if (row := facts_row(kind))}
    measured = verdicts()
    exact = [kind for kind in chosen if kind in measured and measured[kind].get("memory") == "exact"]
    # Two processes: a type takes seconds, of which its config and its module's import are a good part.
    context = get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for number, (kind, (found, left_out)) in enumerate(zip(exact, pool.map(structures, exact), strict=True), 1):
            for name in (kind, *aliases(kind)):
                rows.setdefault(name, {})["structures"] = found
            counts = f"{len(found.get('models', ()))} models, {len(found.get('layers', ()))} layers"
            print(f"[{number}/{len(exact)}] {kind}: {counts} {'; '.join(left_out)}", flush=True)
    return rows


def write(rows: dict[str, Row], *, keep: dict[str, Any]) -> None:
    """Write the table and the page. `rows`: parts of rows by type; `keep`: the table of an earlier survey."""
    own = keep["architectures"]
    merged = {kind: own.get(kind, {}) | rows.get(kind, {}) for kind in sorted({*own, *rows})}
    table = {**keep, "architectures": {kind: row for kind, row in merged.items() if row}}
    TABLE.write_text(as_text(table), encoding="utf-8")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(table), encoding="utf-8")


def as_text(table: dict[str, Any]) -> str:
    """Return the table as JSON with a line for each verdict, each type's facts and each structure."""
    head = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in table.items() if key != "architectures"]
    kinds = []
    for kind, row in table["architectures"].items():
        parts = [f"   {json.dumps(name)}: {json.dumps(row[name])}" for name in ("verdict", "facts") if row.get(name)]
        for name, found in row.get("structures", {}).items():
            lines = ",\n".join(f"     {json.dumps(key)}: {json.dumps(each)}" for key, each in sorted(found.items()))
            parts.append(f"    {json.dumps(name)}: {{\n{lines}\n    }}")
        if row.get("structures"):
            count = len(row["structures"])
            parts[-count:] = ['   "structures": {\n' + ",\n".join(parts[-count:]) + "\n   }"]
        kinds.append(f"  {json.dumps(kind)}: {{\n" + ",\n".join(parts) + "\n  }")
    return "{\n" + "".join(head) + ' "architectures": {\n' + ",\n".join(kinds) + "\n }\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", help="model types, separated by commas; all of them if not given")
    parser.add_argument("--facts", action="store_true", help="measure facts and structures, and no parity")
    parser.add_argument("--write", action="store_true", help="write the table and the page")
    arguments = parser.parse_args()
    chosen = arguments.kinds.split(",") if arguments.kinds else kinds()
    unknown = sorted(set(chosen) - set(kinds()))
    if unknown:
        parser.error(f"transformers {transformers.__version__} has no causal-LM type {unknown[0]!r}")
    keep = json.loads(TABLE.read_text(encoding="utf-8"))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    if arguments.facts:
        rows = facts(chosen)
        keep["facts"] = versions
    else:
        found = survey(chosen)
        exact = sum(row["verdict"] == "exact" for row in found.values())
        print(f"{exact} exact, {len(found) - exact} refused")
        rows = {kind: {"verdict": row} for kind, row in found.items()}
        keep |= {**versions, "tolerance": TOLERANCE}
        if not arguments.kinds:
            # A type that the installed transformers no longer has loses its verdict.
            for row in keep["architectures"].values():
                row.pop("verdict", None)
    if arguments.write:
        write(rows, keep=keep)


if __name__ == "__main__":
    main()
