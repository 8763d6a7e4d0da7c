"""`ithaca verify`: parity of the user's own model and data, sequence-parallel against one process.

    verify      reads and checks the options before any rank is there
    _verify_on  launches `sp` ranks on the CPU, and a second set on the GPUs if there are any
    verify_rank builds the model and runs the checks as one rank; rank 0 prints

Exit code 1: a check failed.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ithaca.cli.process import show_own_warnings_only
from ithaca.cli.run_words import load_typed_run, split_words
from ithaca.errors import ConfigError
from ithaca.exit_codes import FAILED, INTERRUPTED, PREEMPTED
from ithaca.launch.scratch import scratch_folder
from ithaca.launch.stopped import say_stopped
from ithaca.launch.terminal import say_loading
from ithaca.quantities import expand_home
from ithaca.report.plan_files import check_report

if TYPE_CHECKING:
    from ithaca.config.schema import RunSettings

LEAST_LENGTH = 24
DEFAULT_SP = 2
# Seconds between SIGTERM and SIGKILL: the ranks save nothing, and may be waiting in a collective.
_GRACE = 5.0


@dataclass(frozen=True, slots=True)
class _Request:
    """Options of the command; `config` has the changes of the model's config, also for a model without a run."""

    run: RunSettings | None
    model: str
    layers: int | None
    length: int | None
    report: str
    config: dict[str, Any]
    degree: int


def verify(
    words: list[str] = typer.Argument(
        None, metavar="[RUN.YAML] [KEY.SUB=VALUE]...", help="A run file, and settings that override it."
    ),
    model: str = typer.Option("", metavar="FOLDER_OR_TYPE", help="A model's folder, or an architecture such as qwen3."),
    sp: int | None = typer.Option(None, help="Ranks that share one sequence; the run's, or 2, if left out."),
    layers: int | None = typer.Option(None, help="Layers to keep; two, and at least one of each kind, if left out."),
    length: int | None = typer.Option(None, help="Tokens of a row; 47, or 12 for each rank, if left out."),
    device: str = typer.Option("auto", help="cpu, cuda (the GPUs alone), or auto for both."),
    report: str = typer.Option("", "--json", metavar="FILE", help="Also write the results to this JSON file."),
) -> None:
    """Prove on your own model and data that sequence parallelism changes nothing."""
    file, overrides = split_words(words)
    model = expand_home(model) if model else model
    # With --model and settings of its config alone there are no documents to read: the model is verified by itself.
    model_alone = bool(model) and file is None and all(each.startswith("model.config") for each in overrides)
    given = load_typed_run(words)
    run = None if model_alone else given
    if run is not None and model:
        run = run.model_copy(update={"model": run.model.model_copy(update={"name": model})})
    if length is not None and length < LEAST_LENGTH:
        raise ConfigError(f"--length {length}: use {LEAST_LENGTH} tokens at least")
    if layers is not None and layers < 1:
        raise ConfigError(f"--layers {layers}: use one at least, or leave it out")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: choose auto, cpu or cuda")
    degree = _largest_degree(run) if sp is None else sp
    if degree < 2:
        raise ConfigError(f"--sp {degree} leaves one process with nothing to compare it to: use --sp 2 or more")
    if report:
        check_report(Path(report))
    say_loading("loading torch, transformers and the model to verify")
    gpus = 0 if device == "cpu" else _count_gpus(required=device == "cuda")
    request = _Request(run, model, layers, length, report, given.model.config, degree)
    statuses = []
    if device != "cuda":
        statuses.append(_verify_on("cpu", request))
    if gpus and max(statuses, default=0) <= FAILED:
        statuses.append(_verify_on("cuda", replace(request, degree=min(degree, gpus)), append=bool(statuses)))
    if any(statuses):
        raise typer.Exit(max(statuses))


def _largest_degree(run: RunSettings | None) -> int:
    """Return the largest sequence-parallel degree of the run's stages; 2 if none is set. A ring is refused."""
    if run is None:
        return DEFAULT_SP
    run.mesh.refuse_ring()
    degrees = [stage.sp or run.mesh.sp for stage in run.stages]
    return max((degree for degree in degrees if isinstance(degree, int)), default=DEFAULT_SP)


def _count_gpus(*, required: bool) -> int:
    import torch

    found = torch.cuda.device_count()
    if required and not found:
        raise ConfigError("--device cuda, but torch sees no GPU here: leave it out, or install a CUDA build")
    return found


def _verify_on(device: Literal["cpu", "cuda"], request: _Request, *, append: bool = False) -> int:
    """Read the model and the documents, and run the checks on ranks of one kind; return their exit code.

    `append`: keep the report, which the CPU's ranks have written.
    """
    from ithaca.launch.launcher import launch

    with scratch_folder() as scratch, warnings.catch_warnings():
        _silence_libraries()
        import torch

        from ithaca.verify.inputs import gather

        dtype = torch.float64 if device == "cpu" else torch.float32
        # Under torchrun the number of ranks is not ours to choose.
        launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        material = gather(
            request.run,
            request.model,
            ranks=int(os.environ["WORLD_SIZE"]) if launched else request.degree,
            layers=request.layers,
            length=request.length,
            dtype=dtype,
            scratch=Path(scratch),
            changes=request.config,
        )
        # Pickled here and not by the launcher: a rank silences libraries and handles Ctrl-C before it unpickles, which
        # imports torch and transformers.
        given = (pickle.dumps(material), device, request.report)
        if request.report and not append:
            # An old report may be another model's.
            Path(request.report).unlink(missing_ok=True)
        status = launch(
            "ithaca.cli.verify:verify_rank", given, processes=request.degree, device=device, grace=_GRACE, saves=False
        )
    if status in (INTERRUPTED, PREEMPTED):
        say_stopped("verify")
    return status


def _silence_libraries() -> None:
    """Drop the libraries' warnings: about unusual uses, such as checkpoints in one process, made here on purpose."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def verify_rank(material: bytes, device: str, report: str) -> int:
    """Run the checks as one rank; return 1 if one fails. `material`: a pickled `ithaca.verify.inputs.Material`."""
    show_own_warnings_only()
    _silence_libraries()
    # The samples are awkward on purpose, with labels on padding: no warning about them.
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
