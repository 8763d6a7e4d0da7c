"""`ithaca export`: a checkpoint of a run as a standard Hugging Face folder, on any machine, without GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer


def export(
    path: Path = typer.Argument(..., metavar="RUN_OR_CHECKPOINT", help="A run's folder, or one of its checkpoints."),
    to: Path | None = typer.Option(None, help="Where to write; RUN/export if left out."),
    step: int | None = typer.Option(None, help="The checkpoint of this step; the newest whole one if left out."),
    dtype: Literal["bf16", "fp32"] | None = typer.Option(None, help="What to write weights in; as kept if left out."),
) -> None:
    """Write a checkpoint as a Hugging Face model that plain transformers loads."""
    import torch

    from ithaca.state.export import export_checkpoint, find_checkpoint

    checkpoint = find_checkpoint(path, step)
    target = to or _run_of(checkpoint) / "export"
    width = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}[dtype]
    export_checkpoint(checkpoint, target, dtype=width)
    typer.echo(f"{checkpoint} -> {target}")
    typer.echo(f'load it with: AutoModelForCausalLM.from_pretrained("{target}")')


def _run_of(checkpoint: Path) -> Path:
    parent = checkpoint.resolve().parent
    return parent.parent if parent.name == "checkpoints" else parent
