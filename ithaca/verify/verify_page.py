"""The page of `ithaca verify`: the model, a line for each check as it ends, the verdict; and the same as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import Console
from rich.markup import escape

from ithaca.mesh import Mesh
from ithaca.verify.batches import Sample
from ithaca.verify.checks import Line
from ithaca.verify.small_subject import Subject

# The column in which a line's detail begins.
_DETAIL = 45


class Page:
    """The printed page; only the rank with `shows` prints."""

    def __init__(self, *, shows: bool) -> None:
        self.console = Console(quiet=not shows, highlight=False, soft_wrap=True)

    def open(self, subject: Subject, sample: Sample, mesh: Mesh) -> None:
        """Print the model, what was cut, and the sample."""
        self.console.print(
            f"[bold]{escape(subject.config.model_type)}[/]: sp={mesh.sp} compared with one process, {mesh.device.type}, "
            f"{_dtype(subject)}"
        )
        notes = ", ".join(subject.notes)
        self.console.print(f"  {escape(notes)}; {escape(sample.origin)}, rows of {sample.length} tokens")
        self.console.print(f"    {'check':<22}{'error':>9} {'limit':<8} what was compared", style="dim")

    def line(self, line: Line) -> None:
        """Print one check."""
        mark = "[green]ok [/]" if line.ok else "[bold red]off[/]"
        limit = f"<= {line.limit:.2g}" if line.limit else "= 0"
        detail = escape(self._fold(line.detail))
        self.console.print(f"{mark} {line.name:<22}{line.figure:>9.2g} {limit:<8} {detail}")

    def _fold(self, detail: str) -> str:
        """Return the detail folded into its own column on a terminal, on one line in a file."""
        if not self.console.is_terminal:
            return detail
        width = max(self.console.width, _DETAIL + 20)
        return fill(detail, width, initial_indent=" " * _DETAIL, subsequent_indent=" " * _DETAIL).lstrip()

    def close(self, lines: list[Line], seconds: float) -> None:
        """Print the verdict."""
        off = [line.name for line in lines if not line.ok]
        if off:
            self.console.print(
                f"[bold red]{len(off)} of {len(lines)} checks are off[/]: {', '.join(off)} ({seconds:.0f} s). "
                "Do not train like this: over ranks this model computes something else than in one process"
            )
        else:
            self.console.print(
                f"[bold green]all {len(lines)} checks are right[/] ({seconds:.0f} s): the same as one process, but for rounding"
            )

    def write(self, file: Path, lines: list[Line], subject: Subject, sample: Sample, mesh: Mesh) -> None:
        """Write the results as JSON, beside those of an earlier set of ranks (the CPU's before the GPUs')."""
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        result = {
            "ok": all(line.ok for line in lines),
            "model_type": subject.config.model_type,
            "config": json.loads(subject.config.to_json_string()),
            "notes": list(subject.notes),
            "dtype": _dtype(subject),
            "sp": mesh.sp,
            "sample": {"origin": sample.origin, "length": sample.length},
            "checks": [_as_json(line) for line in lines],
            "versions": _versions(),
        }
        file.write_text(json.dumps({**before, mesh.device.type: result}, indent=1) + "\n", encoding="utf-8")


def _dtype(subject: Subject) -> str:
    return str(subject.dtype).removeprefix("torch.")


def _as_json(line: Line) -> dict[str, Any]:
    """Return a line as JSON, which has no infinity: a figure that is not finite becomes null."""
    return {**asdict(line), "figure": line.figure if isfinite(line.figure) else None, "ok": line.ok}


def _versions() -> dict[str, str]:
    import torch
    import transformers

    from ithaca import __version__

    return {"ithaca": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
