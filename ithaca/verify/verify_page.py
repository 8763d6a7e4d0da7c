"""What `ithaca verify` shows: the model, a line a check as it comes, the verdict; and the same as JSON."""

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
    """Prints on the one rank that `shows`."""

    def __init__(self, *, shows: bool) -> None:
        self.console = Console(quiet=not shows, highlight=False, soft_wrap=True)

    def open(self, subject: Subject, sample: Sample, mesh: Mesh) -> None:
        """What is verified, and on what."""
        kind = subject.config.model_type
        width = str(subject.dtype).removeprefix("torch.")
        notes = ", ".join(subject.notes)
        self.console.print(f"[bold]{escape(kind)}[/]: sp={mesh.sp} against one process, {mesh.device.type}, {width}")
        self.console.print(f"  {escape(notes)}; {escape(sample.origin)}, rows of {sample.length}")
        self.console.print(f"    {'check':<22}{'found':>9} {'limit':<8} what was compared", style="dim")

    def line(self, line: Line) -> None:
        """One check."""
        mark = "[green]ok [/]" if line.ok else "[bold red]off[/]"
        limit = f"<= {line.limit:.2g}" if line.limit else "= 0"
        self.console.print(f"{mark} {line.name:<22}{_figure(line):>9} {limit:<8} {escape(self._fold(line.detail))}")

    def _fold(self, detail: str) -> str:
        """The detail, on a terminal in its own column; in a file on one line."""
        if not self.console.is_terminal:
            return detail
        width = max(self.console.width, _DETAIL + 20)
        return fill(detail, width, initial_indent=" " * _DETAIL, subsequent_indent=" " * _DETAIL).lstrip()

    def close(self, lines: list[Line], seconds: float) -> None:
        """The verdict."""
        off = [line.name for line in lines if not line.ok]
        if off:
            self.console.print(
                f"[bold red]{len(off)} of {len(lines)} checks are off[/]: {', '.join(off)} ({seconds:.0f} s). "
                "Do not train like this: the figures say where it differs from one process"
            )
        else:
            self.console.print(
                f"[bold green]all {len(lines)} checks are right[/] ({seconds:.0f} s): the same as one process, but for rounding"
            )

    def write(self, file: Path, lines: list[Line], subject: Subject, sample: Sample, mesh: Mesh) -> None:
        """Results with versions; those of the set of ranks before (the CPU's before the GPUs') stay beside them."""
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        result = {
            "ok": all(line.ok for line in lines),
            "model_type": subject.config.model_type,
            "config": json.loads(subject.config.to_json_string()),
            "notes": list(subject.notes),
            "dtype": str(subject.dtype).removeprefix("torch."),
            "sp": mesh.sp,
            "sample": {"origin": sample.origin, "length": sample.length},
            "checks": [_plain(line) for line in lines],
            "versions": _versions(),
        }
        file.write_text(json.dumps({**before, mesh.device.type: result}, indent=1) + "\n", encoding="utf-8")


def _figure(line: Line) -> str:
    return f"{line.figure:.2g}"


def _plain(line: Line) -> dict[str, Any]:
    """JSON has no infinity: what is not finite is null, and off."""
    return {**asdict(line), "figure": line.figure if isfinite(line.figure) else None, "ok": line.ok}


def _versions() -> dict[str, str]:
    import torch
    import transformers

    from ithaca import __version__

    return {"ithaca": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
