"""`ithaca verify`: proof on the user's own model and data that sequence parallelism changed nothing.

This file reads what is to be verified and refuses what cannot be, before any rank is there; then it starts `sp` ranks
on the CPU, and where there are GPUs a second set on them. Each rank builds the model for itself; the first one prints.
Status 1: something is off.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ithaca.cli.quiet import quiet
from ithaca.cli.train import split_words
from ithaca.errors import ConfigError
from ithaca.exit_codes import FAILED, INTERRUPTED, MISTAKE, PREEMPTED
from ithaca.launch.scratch import scratch_folder
from ithaca.launch.stopped import say_stopped
from ithaca.launch.terminal import say_loading
from ithaca.quantities import at_home
from ithaca.report.plan_files import check_report

if TYPE_CHECKING:
    from ithaca.config.schema import Run

LEAST_LENGTH = 24
# Ranks have nothing to save: those that a signal does not end at once wait in a collective.
_GRACE = 5.0


def verify(
    words: list[str] = typer.Argument(None, metavar="[RUN.YAML] [KEY.SUB=VALUE]...", help="A run file; settings."),
    model: str = typer.Option("", metavar="FOLDER_OR_TYPE", help="A model's folder, or an architecture such as qwen3."),
    sp: int | None = typer.Option(None, help="Ranks a sequence is split over; the run's, or 2, if left out."),
    layers: int | None = typer.Option(None, help="Layers to keep; two, and one of each kind at least, if left out."),
    length: int | None = typer.Option(None, help="Tokens of a row of the sample; 47, or 12 a rank, if left out."),
    device: str = typer.Option("auto", help="auto, cpu or cuda: the GPUs alone."),
    report: str = typer.Option("", "--json", metavar="FILE", help="Write the results as JSON too."),
) -> None:
    """Prove on your own model and data that sequence parallelism changes nothing."""
    from ithaca.config.schema import load_run

    file, overrides = split_words(words or [])
    model = at_home(model) if model else model
    # Values of the model's config ask for no documents: what is verified is still the model alone.
    named = bool(model) and file is None and all(each.startswith("model.config") for each in overrides)
    read = load_run(file, overrides)
    changes, run = read.model.config, None if named else read
    if run is not None and model:
        run = run.model_copy(update={"model": run.model.model_copy(update={"name": model})})
    if length is not None and length < LEAST_LENGTH:
        raise ConfigError(f"--length {length}: use {LEAST_LENGTH} tokens at least")
    if layers is not None and layers < 1:
        raise ConfigError(f"--layers {layers}: use one at least, or leave it out")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: choose auto, cpu or cuda")
    degree = _degree_of(run) if sp is None else sp
    if degree < 2:
        raise ConfigError(f"--sp {degree} leaves one process with nothing to compare it to: use --sp 2 or more")
    if report:
        check_report(Path(report))
    say_loading("loading torch, transformers and the model to verify")
    gpus = 0 if device == "cpu" else _count_gpus(required=device == "cuda")
    statuses = []
    if device != "cuda":
        statuses.append(_on("cpu", degree, run, model, layers, length, report, changes))
    if gpus and max(statuses, default=0) < 2:
        beside = bool(statuses)
        statuses.append(_on("cuda", min(degree, gpus), run, model, layers, length, report, changes, beside=beside))
    if any(statuses):
        raise typer.Exit(max(statuses))


def _degree_of(run: Run | None) -> int:
    """The largest degree that a stage of the run names; what the run could not do is refused as there."""
    if run is None:
        return MISTAKE
    run.mesh.refuse_ring()
    named = [stage.sp or run.mesh.sp for stage in run.stages]
    return max((degree for degree in named if isinstance(degree, int)), default=2)


def _count_gpus(*, required: bool) -> int:
    import torch

    found = torch.cuda.device_count()
    if required and not found:
        raise ConfigError("--device cuda, but torch sees no GPU here: leave it out, or install a CUDA build")
    return found


def _on(
    device: Literal["cpu", "cuda"],
    degree: int,
    run: Run | None,
    model: str,
    layers: int | None,
    length: int | None,
    report: str,
    changes: dict[str, Any],
    *,
    beside: bool = False,
) -> int:
    """Gather the material, and run the checks on it on `degree` ranks of a kind; gives their status.

    `changes`: of the config of a model without a run. `beside`: the ranks before have written to the report, which stays.
    """
    from ithaca.launch.launcher import launch

    with scratch_folder() as scratch, warnings.catch_warnings():
        _hush()
        import torch

        from ithaca.verify.inputs import gather

        dtype = torch.float64 if device == "cpu" else torch.float32
        # Under torchrun the ranks are there already.
        ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else degree
        material = gather(
            run, model, ranks=ranks, layers=layers, length=length, dtype=dtype, scratch=Path(scratch), changes=changes
        )
        # As bytes, so that a rank is quiet, and out of Ctrl-C's way, before it imports what they are made of.
        given = (pickle.dumps(material), device, report)
        if report and not beside:
            # What an earlier command left is of another model, or of another day.
            Path(report).unlink(missing_ok=True)
        status = launch("ithaca.cli.verify:work", given, processes=degree, device=device, grace=_GRACE, saves=False)
    if status in (INTERRUPTED, PREEMPTED):
        say_stopped("verify")
    return status


def _hush() -> None:
    """What libraries warn of is about checkpoints in one process and the like, which is just what is wanted here."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def work(material: bytes, device: str, report: str) -> int:
    """What one rank does; gives 1 where something is off. `material`: a pickled `ithaca.verify.inputs.Material`."""
    quiet()
    _hush()
    # The samples are made here to be awkward, labels on padding among them: nobody is to mend them.
    logging.getLogger("ithaca").setLevel(logging.ERROR)
    from ithaca.mesh import init_mesh
    from ithaca.verify.checklist import verify
    from ithaca.verify.gpus import verify_devices
    from ithaca.verify.inputs import Material
    from ithaca.verify.verify_page import Page

    began = time.monotonic()
    given: Material = pickle.loads(material)
    subject, sample = given.subject, given.sample
    mesh = init_mesh(sp=int(os.environ.get("WORLD_SIZE", "1")), device=None if device == "cuda" else "cpu")
    page = Page(shows=mesh.rank == 0)
    page.open(subject, sample, mesh)
    build, scratch = subject.build, given.scratch
    if device == "cpu":
        lines = verify(build, sample, mesh, promote=subject.exact, on_line=page.line, scratch=scratch)
    else:
        lines = verify_devices(build, sample, mesh, kernel=given.kernel, on_line=page.line, scratch=scratch)
    page.close(lines, time.monotonic() - began)
    if report and mesh.rank == 0:
        page.write(Path(report), lines, subject, sample, mesh)
    return 0 if all(line.ok for line in lines) else FAILED
