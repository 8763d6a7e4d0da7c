"""`ithaca doctor`: trials of this machine for training, each with its result and the way to mend it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from ithaca.exit_codes import FAILED
from ithaca.launch.terminal import say_loading

_STYLES = {
    "good": "green", "right": "green", "missing": "dim", "tight": "yellow", "wrong": "bold red", "broken": "bold red",
}  # fmt: skip


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    folder: Path = typer.Option(Path("runs"), help="Folder of the runs, whose disk is checked."),
) -> None:
    """Check this machine for training; exit code 1 if training cannot run here."""
    say_loading("loading torch and trying this machine")
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
