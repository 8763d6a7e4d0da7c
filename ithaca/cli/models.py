"""`ithaca models`: which architectures are exact under sequence parallelism, and why the others are refused."""

from __future__ import annotations

import difflib
import json
from importlib.resources import files

import typer
from rich.console import Console
from rich.table import Table

from ithaca.errors import UnsupportedError


def models(
    kind: str = typer.Argument("", metavar="[TYPE]", help="A model_type such as qwen3; all of them if left out."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Which architectures train exactly here, and why the others are refused."""
    text = files("ithaca.models").joinpath("verdicts.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, str]] = json.loads(text)["architectures"]
    if kind and kind not in table:
        near = difflib.get_close_matches(kind, table, 3)
        hint = f": did you mean {', '.join(near)}?" if near else f": `ithaca models` lists all {len(table)}"
        raise UnsupportedError(f"no causal-LM architecture is called {kind!r}{hint}")
    chosen = {kind: table[kind]} if kind else table
    if as_json:
        typer.echo(json.dumps(chosen, indent=1))
        return
    Console().print(_rows(chosen))


def _rows(chosen: dict[str, dict[str, str]]) -> Table:
    rows = Table("architecture", "verdict", "reason", box=None, pad_edge=False)
    for kind, row in sorted(chosen.items(), key=lambda item: (item[1]["verdict"] != "exact", item[0])):
        colour = "green" if row["verdict"] == "exact" else "red"
        rows.add_row(kind, f"[{colour}]{row['verdict']}[/]", row["reason"])
    return rows
