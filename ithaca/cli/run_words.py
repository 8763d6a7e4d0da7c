"""The words of verbs that take a run: `ithaca train [RUN.YAML] [KEY.SUB=VALUE]...`.

`--steps 200` is refused with the setting to type: stages.0.steps=200. Every other mistake in a command's words becomes
one sentence too (`VerbGroup`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ithaca.errors import ConfigError, IthacaError

if TYPE_CHECKING:
    from ithaca.config.schema import RunSettings

# Keys of the default stage that leave its length to the model.
_FREE = ("steps", "tokens", "batch", "lr", "schedule", "warmup", "final", "sp")


# click's class, of which typer has a copy of its own in some versions.
_UsageError: Any = typer.BadParameter.__mro__[1]


class VerbGroup(TyperGroup):
    """Group of the verbs. A mistake in a verb's words is one sentence, as every other mistake, and no box of typer's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Without any word typer prints the help, by an exception of the same class.
        return (
            super().parse_args(ctx, args)
            if not args
            else _in_one_sentence(lambda: super(VerbGroup, self).parse_args(ctx, args))
        )

    def invoke(self, ctx: Any) -> Any:
        return _in_one_sentence(lambda: super(VerbGroup, self).invoke(ctx))


def _in_one_sentence(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except _UsageError as error:
        raise ConfigError(_describe_usage(error)) from None


def _describe_usage(error: Any) -> str:
    """Return the sentence for a mistake that typer has found: got, needed, and the words to type."""
    from ithaca.config.messages import did_you_mean

    verb = error.ctx.info_name if error.ctx is not None and error.ctx.parent is not None else ""
    given = error.ctx.params if verb else {}
    message = error.message.rstrip(".").replace("Value error, ", "")
    see = f"see `{' '.join(('ithaca', verb, '--help') if verb else ('ithaca', '--help'))}`"
    if extra := re.fullmatch(r"Got unexpected extra argument\S* \((.*)\)", message):
        if given.get("as_json"):
            return f"--json of {verb} takes no file, got {extra[1]}: type --json > {extra[1]}"
        asked = f"type --model {extra[1]}" if "model" in given else see
        return f"{verb} takes no such argument: {extra[1]}: {asked}"
    near = [name for name in getattr(error, "possibilities", None) or () if name != "--help"]
    if hasattr(error, "possibilities"):
        return f"no such option{verb and f' of {verb}'}: {error.option_name}: {did_you_mean(near[:1], see)}"
    if isinstance(error, typer.BadParameter):
        whole = error.format_message().rstrip(".").replace("Value error, ", "")
        if refused := re.fullmatch(r"Invalid value for '?(--?[\w-]+)[^:]*: (.*)", whole, re.DOTALL):
            return re.sub(r"('.*') is not one of (.*)", r"got \1: choose one of \2", f"{refused[1]}: {refused[2]}")
        message = whole
    sentence = f"{message[0].lower()}{message[1:]}"
    return sentence if sentence.endswith("?") else f"{sentence}: {see}"


def split_words(words: list[str] | None) -> tuple[str | None, list[str]]:
    """Return the run file, None if the first word is a setting, and the settings."""
    words = words or []
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def load_typed_run(words: list[str] | None) -> RunSettings:
    """Return the run that the words describe.

    Without a run file and a typed length, the default stage is no longer than the positions of a pretrained model.
    """
    from ithaca.config.schema import ModelSettings, load_run

    file, overrides = split_words(words)
    run = load_run(file, overrides)
    keys = [word.partition("=")[0] for word in overrides]
    typed = [key for key in keys if key.startswith("stages") and key not in {f"stages.0.{name}" for name in _FREE}]
    pretrained = run.model.weights == "pretrained" and run.model.name != ModelSettings().name
    if file is not None or typed or not pretrained:
        return run
    reach = (read_text_config(run) | run.model.config).get("max_position_embeddings")
    if isinstance(reach, int) and 2 <= reach < run.stages[0].length:
        return load_run(None, [*overrides, f"stages.0.length={reach}"])
    return run


def read_text_config(run: RunSettings) -> dict[str, Any]:
    """Return the text model's part of config.json; empty if it cannot be read, which the ranks report."""
    from ithaca.planning.model.config_check import read_content
    from ithaca.planning.model.config_names import common_config

    try:
        return dict(common_config(read_content(Path(run.model.name).expanduser() / "config.json")))
    except (IthacaError, TypeError, ValueError):
        return {}


class RunCommand(TyperCommand):
    """Command of a verb whose arguments are a run file and settings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        for at, word in enumerate(args):
            if word == "--":
                break
            option, given, value = word.partition("=")
            if not option.startswith("--") or option in known:
                continue
            following = args[at + 1] if at + 1 < len(args) and not args[at + 1].startswith("-") else "..."
            if settings := _nearest_settings(option[2:], value if given else following):
                raise ConfigError(f"{option} is no option of {self.name}: settings have no dashes, type {settings}")
        return super().parse_args(ctx, args)


def _nearest_settings(option: str, value: str) -> str:
    """Return the settings that an unknown option may mean, ready to type; empty if none has a similar name."""
    from ithaca.config.messages import find_settings
    from ithaca.config.schema import RunSettings

    names = find_settings(RunSettings, option.replace("-", "_"))
    return " or ".join(f"{name}={'...' if '=' in value else value}" for name in names[:4])
