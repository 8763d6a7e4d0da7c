"""The command line. This file imports next to nothing, so that Ctrl-C is handled while the verbs are imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ithaca.launch.stopped import hearing

if TYPE_CHECKING:
    from ithaca.cli.verbs import app as app


def main() -> None:
    """Run the `ithaca` command."""
    # Only a call from the process's own first file ends the process: tests call this function too.
    with hearing(last=sys._getframe(1).f_globals.get("__name__") == "__main__"):
        from ithaca.cli.verbs import run

        run()


def __getattr__(name: str) -> object:
    if name != "app":
        raise AttributeError(f"module 'ithaca.cli' has no attribute {name!r}")
    from ithaca.cli.verbs import app

    return app
