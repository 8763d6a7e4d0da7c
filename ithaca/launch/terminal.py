"""Lines on a terminal that other processes write to as well: notes of what is loading, messages beside a progress bar.

Importing torch and transformers takes ten seconds and more, in the launcher and again in its ranks; on a terminal that
stays empty for so long the command looks dead. A log file does not get these notes.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

# Wider than any table, so that no cell is cut.
_WHOLE = 400

# Go to the start of the line and erase it: a rank's progress bar may be there, or the ^C that the terminal echoes.
_CLEAR = "\r\x1b[K"


def say_loading(text: str) -> None:
    """Write at once what is loading, if stderr is a terminal. Imports nothing."""
    if sys.stderr.isatty():
        os.write(2, f"{_CLEAR}{text} ...\n".encode())


def print_page(*parts: RenderableType, whole: bool = False) -> None:
    """Print tables as wide as the terminal, or in full width to a file or a pipe; no line ends in blanks.

    `whole`: True for tables of paths and numbers alone, which are printed in full width in a narrow terminal too.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=_WHOLE)
    if whole:
        free = console.options.update(width=_WHOLE)
        console.width = max([console.width, *(Measurement.get(console, free, part).maximum for part in parts)])
    with console.capture() as page:
        for part in parts:
            console.print(part)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in page.get().splitlines()))


def say_beside_a_bar(text: str) -> None:
    """Write a line of the command over a rank's progress bar, which the rank draws again below."""
    clear = _CLEAR if sys.stderr.isatty() else ""
    os.write(2, f"{clear}ithaca: {text.rstrip()}\n".encode())
