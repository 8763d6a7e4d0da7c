"""`ithaca train`: documents to a long-context checkpoint; without arguments, a small run that needs no files.

train         reads and checks the run before any rank is there, then launches the ranks
train_rank    trains as one rank, and prints on rank 0 the files that the run leaves
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

from ithaca.cli.process import show_own_warnings_only
from ithaca.cli.run_words import load_typed_run, read_text_config
from ithaca.exit_codes import INTERRUPTED, PREEMPTED

if TYPE_CHECKING:
    from ithaca.config.schema import RunSettings
    from ithaca.training.trainer import RunResult


def train(
    words: list[str] = typer.Argument(
        None, metavar="[RUN.YAML] [KEY.SUB=VALUE]...", help="A run file, and settings that override it."
    ),
    show: bool = typer.Option(False, "--show", help="Print the whole run file, defaults written out, and stop."),
    processes: int | None = typer.Option(
        None, min=1, help="Ranks on this machine; one for each GPU, or two on the CPU, if left out."
    ),
    nodes: int | None = typer.Option(None, help="Number of machines that take part."),
    node_rank: int | None = typer.Option(None, help="Number of this machine, from 0."),
    rendezvous: str | None = typer.Option(
        None, metavar="HOST:PORT", help="Address at which the machines meet: the first one and a free port."
    ),
    hosts: str = typer.Option("", metavar="A,B,...", help="Run on these machines only: their host names."),
    restart: bool = typer.Option(
        False, "--restart", help="Begin at step 1 if there are checkpoints but none is whole; none is deleted."
    ),
) -> None:
    """Train a model on long sequences; without arguments, a small one made on the spot."""
    from ithaca.config.schema import dump_run
    from ithaca.launch.launcher import launch
    from ithaca.training.run.before_start import check_folder

    began = time.monotonic()
    # Everything that can be refused without ranks is refused here: ranks take many seconds to start.
    run = load_typed_run(words)
    if show:
        typer.echo(dump_run(run), nl=False)
        return
    check_paths(run)
    _check_dropout(run)
    ended = check_folder(run)
    if ended is not None:
        # Under torchrun or srun every rank is here; rank 0 alone prints.
        if os.environ.get("RANK", "0") == "0" and os.environ.get("SLURM_PROCID", "0") == "0":
            typer.echo(f"ithaca: {ended}", err=True)
        return
    status = launch(
        "ithaca.cli.train:train_rank",
        (run.model_dump_json(), restart, began),
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


def check_paths(run: RunSettings) -> None:
    """Refuse a mistyped folder or file before the ranks start, which takes long."""
    from ithaca.config.messages import check_folder
    from ithaca.data.sources.locate import locate
    from ithaca.data.sources.own_files import refuse_own_files
    from ithaca.data.sources.source_names import sources_of

    check_folder(run.model.name, "model.name")
    for source, typed in sources_of(run):
        if not Path(source.path).expanduser().exists():
            locate(source, typed)
    refuse_own_files(run)


def _check_dropout(run: RunSettings) -> None:
    """Refuse attention dropout that a folder's config.json names; the ranks check what the model type sets itself."""
    from ithaca.planning.model.config_names import refuse_attention_dropout

    config = read_text_config(run) | run.model.config
    refuse_attention_dropout(config.get)


def _check_ranks(run: RunSettings, world: int, typed: Callable[[int], str | None]) -> None:
    """Refuse degrees that do not fit the number of ranks or the model's heads.

    `typed`: returns the option to type for another number of ranks.
    """
    from ithaca.training.degrees import StageDegrees

    heads = read_text_config(run).get("num_attention_heads")
    known = heads if isinstance(heads, int) and heads > 0 else None
    StageDegrees(run.mesh, run.stages, world, known, typed).check()


def train_rank(text: str, restart: bool = False, began: float | None = None) -> int:
    """Train as one rank; return 0, 75 if a signal stopped the run before its end, or 130 if Ctrl-C did.

    `began`: the command's start by `time.monotonic`, a clock that all processes of a machine share.
    """
    show_own_warnings_only()
    from ithaca.config.schema import RunSettings
    from ithaca.errors import DataError
    from ithaca.report.loss_picture import draw_loss
    from ithaca.training.run.run_folder import RunFolder
    from ithaca.training.trainer import train as train_rank

    began = time.monotonic() if began is None else began
    outcome = train_rank(RunSettings.model_validate_json(text), restart=restart)
    if not outcome.finished:
        return INTERRUPTED if outcome.interrupted else PREEMPTED
    if int(os.environ.get("RANK", "0")) == 0:
        folder = RunFolder(outcome.folder)
        try:
            draw_loss(folder.metrics, folder.picture)
        except DataError as error:
            # No reason to fail a finished run: the picture can be drawn again from metrics.jsonl.
            typer.echo(f"warning: {error}", err=True)
        typer.echo(describe_end(outcome, time.monotonic() - began), err=True)
    return 0


def describe_end(outcome: RunResult, seconds: float) -> str:
    """Return the last lines of a run: its losses, its files, and the commands to type next."""
    from ithaca.errors import DataError
    from ithaca.quantities import plural
    from ithaca.report.loss_picture import read_metrics
    from ithaca.training.run.run_folder import RunFolder

    folder = RunFolder(outcome.folder)
    try:
        steps = [line["loss"] for line in read_metrics(folder.metrics) if line["kind"] == "step"]
    except DataError:
        # `train_rank` has printed the warning.
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
    existing = [(name, path) for name, path in lines if isinstance(path, str) or path.exists()]
    files = "\n".join(f"  {name:<12}{path}" for name, path in existing)
    progress = outcome.progress
    none = "no step had a loss" if steps else f"the losses of its steps are not in {folder.metrics}"
    course = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else none
    skipped = ((progress.silent, "nothing to learn"), (progress.bad, "a loss or gradient that is not finite"))
    for count, why in skipped:
        course += f"; {plural(count, 'step')} not taken for {why}" if count else ""
    done = f"{plural(progress.total, 'step')}, {progress.tokens:,} tokens; {course}; this start took {minutes}"
    return f"\n{done}\n{files}{_next_commands(folder.settings)}"


def _next_commands(settings: Path) -> str:
    """Return commands for the user's own model and documents; empty after any run but the embedded one."""
    from ithaca.config.schema import ModelSettings, load_run

    if load_run(settings).model.name != ModelSettings().name:
        return ""
    cards = _own_cards()
    # No setting of the embedded run is kept: its learning rate and RoPE are for untrained weights.
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


def _own_cards() -> str | None:
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
