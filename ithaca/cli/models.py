"""`ithaca models`: architectures that train exactly under sequence parallelism, and reasons for refusing the others."""

from __future__ import annotations

import difflib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from ithaca.errors import UnsupportedError
from ithaca.launch.terminal import print_page
from ithaca.planning.model.config_check import read_content
from ithaca.planning.model.known_models import find_model


def models(
    kind: str = typer.Argument(
        "",
        metavar="[TYPE_OR_FOLDER]",
        help="A model_type such as qwen3, a model's folder or name; all types if left out.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the architectures that train exactly, and the reasons for refusing the others."""
    text = files("ithaca.models").joinpath("verdicts.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)["architectures"]
    kind = kind if kind in table else _type_of(kind)
    if kind and kind not in table:
        near = difflib.get_close_matches(kind, table, 3)
        hint = f": did you mean {', '.join(near)}?" if near else f": `ithaca models` lists all {len(table)}"
        raise UnsupportedError(f"no causal-LM architecture (`model_type` in a config.json) is called {kind!r}{hint}")
    chosen = {kind: table[kind]} if kind else table
    if as_json:
        typer.echo(json.dumps(chosen, indent=1))
        return
    print_page(_rows(chosen))


def _rows(chosen: dict[str, dict[str, Any]]) -> Table:
    rows = Table("architecture", "verdict", "reason", box=None, pad_edge=False)
    for kind, row in sorted(chosen.items(), key=lambda item: (item[1]["verdict"] != "exact", item[0])):
        exact = row["verdict"] == "exact"
        close = f"loss, logits and gradients are those of one process, fp64, within {row['worst']:.0e}" if exact else ""
        rows.add_row(kind, f"[{'green' if exact else 'red'}]{row['verdict']}[/]", close or str(row["reason"]))
    return rows


def _type_of(name: str) -> str:
    """Return the model_type of a folder or of a model of the built-in table; any other name as it is."""
    config = Path(name, "config.json")
    if config.is_file():
        return str(read_content(config).get("model_type", ""))
    known = find_model(name)
    return name if known is None else known.kind
