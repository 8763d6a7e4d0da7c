"""The survey: a verdict on every causal-LM type of the installed transformers, by source and by measurement.

    python -m tools.survey.survey [--kinds llama,bloom] [--write]

Prints a line for each type. `--write` puts the verdicts into `ithaca/models/verdicts.json` (with `--kinds`: those
rows alone) and makes `docs/architectures.md` from it. About a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from tools.survey.judge import TOLERANCE, Row, judge
from tools.survey.page import page
from tools.survey.run import Measured, Ranks
from tools.survey.static import aliases, kinds, look

ROOT = Path(__file__).resolve().parents[2]
VERDICTS = ROOT / "ithaca" / "models" / "verdicts.json"
PAGE = ROOT / "docs" / "architectures.md"
WORLDS = (2, 4)


class Fleet:
    """One set of ranks a world size, started when first needed."""

    def __init__(self) -> None:
        self.ranks = {world: Ranks(world) for world in WORLDS}

    def measure(self, world: int, kind: str, *, memory: bool = False, **overrides: Any) -> Measured:
        return self.ranks[world].measure(kind, memory=memory, **overrides)

    def stop(self) -> None:
        for ranks in self.ranks.values():
            ranks.stop()


def survey(chosen: list[str]) -> dict[str, Row]:
    """The rows of the chosen types, and of the other names their models go by."""
    rows: dict[str, Row] = {}
    fleet = Fleet()
    try:
        for number, kind in enumerate(chosen, 1):
            started = time.monotonic()
            row = judge(look(kind), fleet.measure, WORLDS)
            rows |= dict.fromkeys((kind, *aliases(kind)), row)
            shown = f"off by {row['worst']:.0e} at most" if row["verdict"] == "exact" else row["reason"]
            shown += f", memory: {row['memory']}" if "memory" in row else ""
            seconds = time.monotonic() - started
            print(f"[{number}/{len(chosen)}] {kind}: {row['verdict']}, {shown} ({seconds:.1f} s)", flush=True)
    finally:
        fleet.stop()
    return rows


def write(rows: dict[str, Row], *, keep: dict[str, Row]) -> None:
    """The table and the page; `keep` are rows of an earlier survey."""
    table = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "tolerance": TOLERANCE,
        "architectures": dict(sorted((keep | rows).items())),
    }
    VERDICTS.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(table), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", help="model types, separated by commas; all of them if not given")
    parser.add_argument("--write", action="store_true", help="write the table and the page")
    arguments = parser.parse_args()
    chosen = arguments.kinds.split(",") if arguments.kinds else kinds()
    unknown = sorted(set(chosen) - set(kinds()))
    if unknown:
        parser.error(f"transformers {transformers.__version__} has no causal-LM type {unknown[0]!r}")
    rows = survey(chosen)
    exact = sum(row["verdict"] == "exact" for row in rows.values())
    print(f"{exact} exact, {len(rows) - exact} refused")
    if arguments.write:
        earlier = json.loads(VERDICTS.read_text(encoding="utf-8"))["architectures"] if arguments.kinds else {}
        write(rows, keep=earlier)


if __name__ == "__main__":
    main()
