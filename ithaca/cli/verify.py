"""`ithaca verify`: proof on the user's own model and data that sequence parallelism changed nothing.

This file reads what is to be verified, starts `sp` ranks on the CPU, and where there are GPUs a second set on them.
Each rank builds the model and the sample for itself; the first one prints. Status 1: something is off.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ithaca.cli.quiet import quiet
from ithaca.cli.train import split_words
from ithaca.errors import ConfigError

if TYPE_CHECKING:
    from ithaca.config import Run
    from ithaca.mesh import Mesh
    from ithaca.proof.sample import Sample
    from ithaca.proof.subject import Subject

# A sample that ends within a minute or two on two cores, odd, and of a dozen tokens a rank at least.
LENGTH = 47
_A_RANK = 12
_ROWS = 2


@dataclass(frozen=True, slots=True)
class Request:
    """What the ranks are to do. `run`: a run as JSON, empty if there is none. `report`: where the results go as JSON."""

    run: str
    model: str
    sp: int
    layers: int
    length: int
    report: str
    device: str


def verify(
    words: list[str] = typer.Argument(None, metavar="[RUN.YAML] [KEY.SUB=VALUE]...", help="A run file; settings."),
    model: str = typer.Option("", metavar="FOLDER_OR_TYPE", help="A model's folder, or an architecture such as qwen3."),
    sp: int = typer.Option(0, help="Ranks a sequence is split over; the run's, or 2, if left out."),
    layers: int = typer.Option(0, help="Layers to keep; two, and one of each kind at least, if left out."),
    length: int = typer.Option(0, help="Tokens of a row of the sample."),
    device: str = typer.Option("auto", help="auto, cpu or cuda: the GPUs alone."),
    report: str = typer.Option("", "--json", metavar="FILE", help="Write the results as JSON too."),
) -> None:
    """Prove on your own model and data that sequence parallelism changes nothing."""
    from ithaca.cli.launch import launch
    from ithaca.config import load_run

    file, overrides = split_words(words or [])
    named = bool(model) and file is None and not overrides
    run = None if named else load_run(file, overrides)
    if min(sp, layers, length) < 0 or 0 < length < 2 * _A_RANK:
        raise ConfigError(f"--sp {sp} --layers {layers} --length {length}: use whole numbers, a length of 24 at least")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: choose auto, cpu or cuda")
    degree = sp or _degree_of(run)
    if degree < 2:
        raise ConfigError("--sp 1 is one process, with nothing to compare it to: use --sp 2 or more")
    if report and not Path(report).absolute().parent.is_dir():
        raise ConfigError(f"--json {report}: there is no folder {Path(report).absolute().parent}")
    request = Request(run.model_dump_json() if run is not None else "", model, degree, layers, length, report, "cpu")
    statuses = []
    if device != "cuda":
        statuses.append(_launch(launch, request, degree))
    gpus = 0 if device == "cpu" else _count_gpus(required=device == "cuda")
    if gpus and not any(status == 2 for status in statuses):
        statuses.append(_launch(launch, replace(request, device="cuda"), min(degree, gpus)))
    if any(statuses):
        raise typer.Exit(max(statuses))


def _degree_of(run: Run | None) -> int:
    """The run's own degree, its first stage's before the mesh's; what the run could not do is refused as there."""
    if run is None:
        return 2
    run.mesh.refuse_ring()
    asked = run.stages[0].sp or run.mesh.sp
    return asked if isinstance(asked, int) else 2


def _launch(launch: Any, request: Request, ranks: int) -> int:
    device: Literal["cpu", "cuda"] = "cpu" if request.device == "cpu" else "cuda"
    return launch("ithaca.cli.verify:work", (json.dumps(asdict(request)),), processes=ranks, device=device)


def _count_gpus(*, required: bool) -> int:
    import torch

    found = torch.cuda.device_count()
    if required and not found:
        raise ConfigError("--device cuda, but torch sees no GPU here: leave it out, or install a CUDA build")
    return found


def work(text: str) -> int:
    """What one rank does; gives 1 where something is off."""
    import warnings

    quiet()
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # What libraries warn of is about checkpoints in one process and the like, which is just what is wanted here.
    warnings.simplefilter("ignore")
    from ithaca.cli.verify_page import Page
    from ithaca.mesh import init_mesh
    from ithaca.proof.devices import verify_devices
    from ithaca.proof.verify import shared_folder, verify

    request = Request(**json.loads(text))
    began = time.monotonic()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = init_mesh(sp=ranks, device=None if request.device == "cuda" else "cpu")
    with shared_folder(mesh) as folder:
        subject, sample, kernel = _material(request, mesh, folder)
        page = Page(shows=mesh.rank == 0)
        page.open(subject, sample, mesh)
        if request.device == "cpu":
            lines = verify(subject.build, sample, mesh, promote=subject.exact, tell=page.line)
        else:
            lines = verify_devices(subject.build, sample, mesh, kernel=kernel, tell=page.line)
    page.close(lines, time.monotonic() - began)
    if request.report and mesh.rank == 0:
        page.write(Path(request.report), lines, subject, sample, mesh)
    return 0 if all(line.ok for line in lines) else 1


def _material(request: Request, mesh: Mesh, empty: Path) -> tuple[Subject, Sample, str]:
    """The model, the tokens, and the attention kernel that the run asks for."""
    import torch

    from ithaca.attention.kernels import check_name
    from ithaca.config import Run
    from ithaca.proof.material import agree_on_room, config_of_model, config_of_run, rows_of_run
    from ithaca.proof.sample import from_rows, made_up
    from ithaca.proof.subject import make_subject

    run = Run.model_validate_json(request.run) if request.run else None
    if run is not None:
        check_name(run.model.kernel)
    if run is not None and request.model:
        run = run.model_copy(update={"model": run.model.model_copy(update={"name": request.model})})
    length = request.length or max(LENGTH, _A_RANK * mesh.sp - 1)
    config, folder = config_of_run(run, mesh, empty / "embedded") if run is not None else config_of_model(request.model)
    subject = make_subject(
        config,
        length=length,
        ranks=mesh.world,
        room=agree_on_room(mesh),
        layers=request.layers or None,
        folder=folder,
        dtype=torch.float64 if request.device == "cpu" else torch.float32,
    )
    vocabulary = subject.config.get_text_config().vocab_size
    if run is None:
        return subject, made_up(vocabulary, length), "auto"
    assert folder is not None
    rows = rows_of_run(run, folder, mesh, length, _ROWS)
    sample = from_rows(rows, vocabulary, length, "your data")
    return subject, sample, run.model.kernel
