"""`ithaca train`: from documents to a long-context checkpoint; without arguments, a small run that needs nothing.

This file reads the run, starts the ranks (or finds itself to be one) and says at the end where everything is.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ithaca.cli.quiet import quiet
from ithaca.exit_codes import INTERRUPTED, PREEMPTED

if TYPE_CHECKING:
    from ithaca.config.schema import Run
    from ithaca.training.trainer import RunResult


def train(
    words: list[str] = typer.Argument(None, metavar="[RUN.YAML] [KEY.SUB=VALUE]...", help="A run file; settings."),
    show: bool = typer.Option(False, "--show", help="Print the whole resolved run file and stop."),
    processes: int | None = typer.Option(
        None, min=1, help="Ranks on this machine; all GPUs, or two on the CPU, if left out."
    ),
    nodes: int | None = typer.Option(None, help="Machines that take part."),
    node_rank: int | None = typer.Option(None, help="Which of them this is, from 0."),
    rendezvous: str | None = typer.Option(
        None, metavar="HOST:PORT", help="Where they meet: the first machine, a free port."
    ),
    hosts: str = typer.Option("", metavar="A,B,...", help="Run on these machines only: their host names."),
    restart: bool = typer.Option(
        False, "--restart", help="Begin at step 1 where there are checkpoints and none is whole; none is deleted."
    ),
) -> None:
    """Train a model on long sequences; without arguments, a small one made on the spot."""
    from ithaca.config.schema import dump_run, load_run
    from ithaca.launch.launcher import launch
    from ithaca.training.run.before_start import check_folder

    file, overrides = split_words(words or [])
    run = load_run(file, overrides)
    if show:
        typer.echo(dump_run(run), nl=False)
        return
    check_places(run)
    _check_dropout(run)
    ended = check_folder(run)
    if ended is not None:
        # Under another launcher every rank comes here, and one prints the line.
        if os.environ.get("RANK", "0") == "0" and os.environ.get("SLURM_PROCID", "0") == "0":
            typer.echo(f"ithaca: {ended}", err=True)
        return
    status = launch(
        "ithaca.cli.train:work",
        (run.model_dump_json(), restart),
        processes=processes or run.launch.processes,
        device=run.launch.device,
        grace=run.limits.grace,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        hosts=[host for host in hosts.split(",") if host],
        check=partial(_check_ranks, run),
        setting="launch.processes={}" if processes is None else "--processes {}",
    )
    if status:
        raise typer.Exit(status)


def check_places(run: Run) -> None:
    """Refuse a mistyped folder or file here: ranks take long to start."""
    from ithaca.config.messages import check_folder
    from ithaca.data.sources.locate import locate
    from ithaca.data.sources.own_files import refuse_own_files
    from ithaca.data.sources.source_names import sources_of

    check_folder(run.model.name, "model.name")
    for source, typed in sources_of(run):
        if not Path(source.path).expanduser().exists():
            locate(source, typed)
    refuse_own_files(run)


def _check_dropout(run: Run) -> None:
    """Refuse attention dropout that a folder's config.json names; the ranks check what the model type sets itself."""
    from ithaca.planning.model.config_names import refuse_attention_dropout

    text = _text(Path(run.model.name).expanduser() / "config.json") | run.model.config
    refuse_attention_dropout(text.get)


def _check_ranks(run: Run, world: int, typed: Callable[[int], str | None]) -> None:
    """Refuse degrees that do not fit the number of ranks or the model's heads.

    `typed`: returns what the user types for another number of ranks.
    """
    from ithaca.training.degrees import StageDegrees

    heads = _heads(Path(run.model.name).expanduser() / "config.json")
    StageDegrees(run.mesh, run.stages, world, heads, typed).check()


def _heads(config: Path) -> int | None:
    """Return the attention heads that a config.json names; None if it names none, and the ranks check them."""
    heads = _text(config).get("num_attention_heads")
    return heads if isinstance(heads, int) and heads > 0 else None


def _text(config: Path) -> dict[str, Any]:
    """Return the part of a config.json on its text model; empty if it cannot be read, which the ranks report."""
    from ithaca.errors import IthacaError
    from ithaca.planning.model.config_check import read_content
    from ithaca.planning.model.config_names import text_of

    try:
        return dict(text_of(read_content(config)))
    except (IthacaError, TypeError, ValueError):
        return {}


def split_words(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the run file, if the first word is one, and the overrides."""
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def work(text: str, restart: bool = False) -> int:
    """Train as one rank; return 75 if a signal stopped the run before its end, 130 if Ctrl-C did."""
    quiet()
    from ithaca.config.schema import Run
    from ithaca.errors import DataError
    from ithaca.report.loss_picture import draw_loss
    from ithaca.training.run.run_folder import RunFolder
    from ithaca.training.trainer import train as train_rank

    began = time.monotonic()
    outcome = train_rank(Run.model_validate_json(text), restart=restart)
    if not outcome.finished:
        return INTERRUPTED if outcome.interrupted else PREEMPTED
    if int(os.environ.get("RANK", "0")) == 0:
        folder = RunFolder(outcome.folder)
        try:
            draw_loss(folder.metrics, folder.picture)
        except DataError as error:
            # The run has ended well, and the picture can be drawn again.
            typer.echo(f"warning: {error}", err=True)
        typer.echo(ending(outcome, time.monotonic() - began), err=True)
    return 0


def ending(outcome: RunResult, seconds: float) -> str:
    """Return the lines that end a run: files that exist, and the commands to type next."""
    from ithaca.errors import DataError
    from ithaca.report.loss_picture import read_metrics
    from ithaca.training.run.run_folder import RunFolder

    folder = RunFolder(outcome.folder)
    try:
        steps = [line["loss"] for line in read_metrics(folder.metrics) if line["kind"] == "step"]
    except DataError:
        # `work` has warned of it, and the run has ended well.
        steps = []
    losses = [loss for loss in steps if loss is not None]
    last = sorted(folder.checkpoints.glob("step-*"))[-1]
    minutes = f"{seconds / 60:.1f} minutes" if seconds >= 100 else f"{seconds:.0f} seconds"
    lines: list[tuple[str, Any]] = [
        ("model", f"{folder.model(outcome.progress.stage)}  (loads in plain transformers)"),
        ("checkpoint", last),
        ("metrics", folder.metrics),
        ("loss", folder.picture),
        ("settings", folder.settings),
    ]
    there = [(name, where) for name, where in lines if isinstance(where, str) or where.exists()]
    told = "\n".join(f"  {name:<12}{where}" for name, where in there)
    place = outcome.progress
    none = "no step had a loss" if steps else f"the losses of its steps are not in {folder.metrics}"
    course = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else none
    for count, why in ((place.silent, "nothing to learn"), (place.bad, "a loss or gradient that is not finite")):
        course += f"; {count} {'step' if count == 1 else 'steps'} not taken for {why}" if count else ""
    done = f"{place.total} steps, {place.tokens:,} tokens; {course}; this start took {minutes}"
    return f"\n{done}\n{told}{_next(folder.settings)}"


def _next(settings: Path) -> str:
    """Return commands for the user's own model and documents after the embedded run; nothing after another run.

    The commands keep no setting of the embedded run: its rate and its RoPE are for weights that are not trained yet.
    """
    from ithaca.config.schema import Model, load_run

    if load_run(settings).model.name != Model().name:
        return ""
    cards = _cards()
    if cards is None:
        commands = [
            "ithaca train model.name=MODEL_FOLDER data.sources=DOCUMENTS_FOLDER "
            "'stages=[{length: 4k, steps: 100, lr: 1.0e-5}]'"
        ]
    else:
        commands = [
            f"ithaca plan --model MODEL_FOLDER --length 32k --gpus {cards} --write mine.yaml",
            "ithaca train mine.yaml data.sources=DOCUMENTS_FOLDER",
        ]
    return "\nnext: your own model and documents\n" + "\n".join(f"  {command}" for command in commands)


def _cards() -> str | None:
    """Return this machine's GPUs as `ithaca plan` takes them; None if it has none that the planner knows."""
    import torch

    from ithaca.errors import IthacaError
    from ithaca.planning.machine.hardware import find_device

    if not torch.cuda.is_available():
        return None
    try:
        card = find_device(torch.cuda.get_device_name()).name
    except IthacaError:
        return None
    return shlex.quote(f"{torch.cuda.device_count()}x{card}")
