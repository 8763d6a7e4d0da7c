"""Ctrl-C, for verbs that have nothing to save: one line that says which was stopped, and the status shells expect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

# As a shell has it for what SIGINT ended; the same number as `ithaca.training.watch.INTERRUPTED`, which needs torch.
INTERRUPTED = 130


@contextmanager
def told_when_stopped(verb: str) -> Iterator[None]:
    """Inside, Ctrl-C ends the verb in a sentence."""
    try:
        yield
    except KeyboardInterrupt:
        say_stopped(verb)
        raise typer.Exit(INTERRUPTED) from None


def say_stopped(verb: str) -> None:
    typer.echo(
        f"ithaca: {verb} was stopped before its end and leaves nothing behind: type it again to start anew", err=True
    )
