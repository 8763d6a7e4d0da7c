"""`ithaca export`: a checkpoint of a run as a standard Hugging Face folder, on any machine, without GPUs.

The verb never writes into the run's own models (`stages/`) and `checkpoints/`. A folder that holds anything but an
export of this run is replaced only with `--force`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import typer

from ithaca.errors import ConfigError
from ithaca.launch.stopped import cleaned_if_stopped

_RUN_FOLDERS = ("stages", "checkpoints")


def export(
    path: Path = typer.Argument(..., metavar="RUN_OR_CHECKPOINT", help="A run's folder, or one of its checkpoints."),
    to: Path | None = typer.Option(None, help="Folder to write; RUN/export-step-N if left out."),
    step: int | None = typer.Option(None, help="Step of the checkpoint; the newest whole checkpoint if left out."),
    force: bool = typer.Option(False, "--force", help="Replace the model in the folder --to."),
    dtype: Literal["bf16", "fp32"] | None = typer.Option(
        None, help="Number format of the weights; the checkpoint's if left out."
    ),
) -> None:
    """Write a checkpoint as a Hugging Face model that plain transformers loads."""
    from functools import partial

    import torch

    from ithaca.models.files.export_checkpoint import DESCRIPTION, export_checkpoint, find_checkpoint
    from ithaca.models.files.export_folder import (
        description_of,
        export_into,
        missing_folders,
        refuse_own_folders,
        remove_unfinished,
        run_of,
    )
    from ithaca.state.checkpoint.manifest import step_of

    checkpoint = find_checkpoint(path, step)
    target = to or run_of(checkpoint) / f"export-step-{step_of(checkpoint)}"
    _check_target(target)
    refuse_own_folders(target, run_of(checkpoint), description_of(checkpoint, DESCRIPTION))
    width = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}[dtype]
    with cleaned_if_stopped(partial(remove_unfinished, target, missing_folders(target))):
        export_into(checkpoint, target, partial(export_checkpoint, checkpoint, dtype=width), force=force)
    shown = _as_typed(target, path if to is None else to)
    typer.echo(f"{_as_typed(checkpoint, path)} -> {shown}")
    typer.echo(f'load it with: AutoModelForCausalLM.from_pretrained("{shown}")')


def _as_typed(path: Path, typed: Path) -> str:
    """Return `path` as absolute if `typed` is, else relative to the working folder."""
    return str(path.absolute() if typed.is_absolute() else os.path.relpath(path))


def _check_target(target: Path) -> None:
    """Refuse a folder that lies, perhaps through links, in a run's own `stages/` or `checkpoints/`."""
    try:
        real = target.resolve()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"--to {target} leads nowhere ({error}): name a folder") from None
    for folder in (real, *real.parents):
        if folder.name in _RUN_FOLDERS and (folder.parent / "checkpoints").is_dir():
            where = f"{target} is" if real == target.absolute() else f"{target} leads to {real},"
            raise ConfigError(
                f"--to {where} in {folder}, which the run keeps for itself: name another folder, such as --to "
                f"{folder.parent / 'model'}"
            )
