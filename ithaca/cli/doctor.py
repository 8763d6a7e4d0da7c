"""`ithaca doctor`: what this machine can do, tried; what is missing and how to get it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from ithaca.exit_codes import FAILED
from ithaca.launch.terminal import say_loading

_STYLES = {"good": "green", "missing": "dim", "tight": "yellow", "broken": "bold red"}


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    folder: Path = typer.Option(Path("runs"), help="Where runs would be written."),
) -> None:
    """Say what this machine can do; exit status 1 where training cannot run on it."""
    say_loading("loading torch and trying what this machine has")
    from ithaca.machine.diagnose import examine

    findings = examine(folder)
    broken = [finding for finding in findings if finding.state == "broken"]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
        raise typer.Exit(FAILED if broken else 0)
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    topic = ""
    for finding in findings:
        shown = "" if finding.topic == topic else finding.topic
        topic = finding.topic
        text = f"{finding.found}  -> {finding.fix}" if finding.fix else finding.found
        style = _STYLES[finding.state]
        table.add_row(f"[bold]{shown}[/]", finding.name, f"[{style}]{finding.state}[/]", text.replace("[", r"\["))
    console = Console(highlight=False)
    console.print(table)
    verdict = (
        "training can run here" if not broken else f"training cannot run here: {broken[0].name}, {broken[0].found}"
    )
    console.print(f"\n{verdict}", markup=False)
    if broken:
        raise typer.Exit(FAILED)
