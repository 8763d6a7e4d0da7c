"""The command line. This file imports next to nothing: signals are heard before the verbs are there, which take a while."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ithaca.launch.stopped import command_signals

if TYPE_CHECKING:
    from ithaca.cli.verbs import app as app


def main() -> None:
    """The `ithaca` command."""
    # The process ends with the command only where its own first file made this call.
    with command_signals(last=sys._getframe(1).f_globals.get("__name__") == "__main__"):
        from ithaca.cli.verbs import run

        run()


def __getattr__(name: str) -> object:
    if name != "app":
        raise AttributeError(f"module 'ithaca.cli' has no attribute {name!r}")
    from ithaca.cli.verbs import app

    return app
