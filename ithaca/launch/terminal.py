"""Lines on a terminal that other processes draw on too: what is being loaded, and messages beside a live bar.

Importing torch and transformers takes ten seconds and more, in the launcher and again in its ranks; a terminal that
says nothing for so long looks as if nothing happened. In a log file these lines would be noise and are left out.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

# Wider than any table, so that no cell is cut.
_WHOLE = 400

# To the line's start, and the line emptied: a bar that a rank has drawn there, and the ^C that the terminal echoes.
_CLEAR = "\r\x1b[K"


def say_loading(text: str) -> None:
    """Write what takes a while, at once, where somebody watches; imports nothing."""
    if sys.stderr.isatty():
        os.write(2, f"{_CLEAR}{text} ...\n".encode())


def print_page(*parts: RenderableType, whole: bool = False) -> None:
    """Print tables as wide as the terminal, and whole where they go to a file or a pipe, no line filled with blanks.

    `whole`: lines are as long as they take in a narrow terminal too, for tables of paths and numbers alone.
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
    """Write a line of the command's own where a rank's bar may stand: the bar is drawn again below it."""
    clear = _CLEAR if sys.stderr.isatty() else ""
    os.write(2, f"{clear}ithaca: {text.rstrip()}\n".encode())
