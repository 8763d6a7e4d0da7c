"""The verbs of `ithaca`, one file each, as one command. No heavy import happens before a verb runs."""

from __future__ import annotations

import shutil
import sys

import typer

from ithaca import __version__
from ithaca.cli.doctor import doctor
from ithaca.cli.export import export
from ithaca.cli.help_text import EPILOGS, SUMMARY
from ithaca.cli.models import models
from ithaca.cli.plan import plan
from ithaca.cli.prepare import prepare
from ithaca.cli.process import show_own_warnings_only, use_expandable_segments
from ithaca.cli.rehearse import rehearse
from ithaca.cli.run_words import RunCommand, VerbGroup
from ithaca.cli.train import train
from ithaca.cli.verify import verify
from ithaca.errors import IthacaError
from ithaca.launch.stopped import exit_when_stopped

# In a narrower terminal typer's panels cut the names of options; click's plain pages break lines between words.
_LEAST_COLUMNS = 80

VERBS = (models, plan, rehearse, verify, prepare, train, export, doctor)
# Their arguments are a run file and settings.
TAKE_A_RUN = (rehearse, verify, prepare, train)

app = typer.Typer(
    cls=VerbGroup,
    help=SUMMARY,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= _LEAST_COLUMNS else None,
)
for verb in VERBS:
    command_class = RunCommand if verb in TAKE_A_RUN else None
    register = app.command(cls=command_class, epilog=EPILOGS[verb.__name__], short_help=verb.__doc__)
    register(exit_when_stopped(verb.__name__)(verb))


def _print_version(given: bool) -> None:
    if given:
        typer.echo(f"ithaca {__version__}")
        raise typer.Exit


@app.callback(help=SUMMARY)
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def run() -> None:
    """Run the verb that was typed. A mistake of the user prints one line and ends with the error's exit code."""
    show_own_warnings_only()
    use_expandable_segments()
    try:
        app()
    except IthacaError as error:
        typer.echo(f"ithaca: {error}", err=True)
        sys.exit(error.status)
