"""The verbs of `ithaca`, one file each, as one command. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import shutil
import sys

import typer

from ithaca import __version__
from ithaca.cli.allocator import let_segments_grow
from ithaca.cli.doctor import doctor
from ithaca.cli.export import export
from ithaca.cli.help_text import EPILOGS
from ithaca.cli.models import models
from ithaca.cli.plan import plan
from ithaca.cli.prepare import prepare
from ithaca.cli.quiet import quiet
from ithaca.cli.rehearse import rehearse
from ithaca.cli.stray_settings import TakesSettings
from ithaca.cli.train import train
from ithaca.cli.verify import verify
from ithaca.errors import IthacaError
from ithaca.launch.stopped import exit_when_stopped

# In narrower terminals typer's panels cut the names of options; click's plain pages break lines between words.
_WIDE = 80

app = typer.Typer(
    help="Train Hugging Face language models, exactly, on sequences of a million tokens and more.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= _WIDE else None,
)
for verb in (models, plan, rehearse, verify, prepare, train, export, doctor):
    told = exit_when_stopped(verb.__name__)(verb)
    kind = TakesSettings if verb in (rehearse, verify, prepare, train) else None
    app.command(cls=kind, epilog=EPILOGS[verb.__name__], short_help=verb.__doc__)(told)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ithaca {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Train Hugging Face language models, exactly, on sequences of a million tokens and more."""


def run() -> None:
    """Run the verb that was typed. A user's mistake is one line and the error's own status, 2 of most, never a traceback."""
    quiet()
    let_segments_grow()
    try:
        app()
    except IthacaError as error:
        typer.echo(f"ithaca: {error}", err=True)
        sys.exit(error.status)
