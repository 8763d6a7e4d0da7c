"""The words of verbs that take a run: `ithaca train [RUN.YAML] [KEY.SUB=VALUE]...`.

`--steps 200` is refused with the setting to type: stages.0.steps=200.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from ithaca.errors import ConfigError


def split_words(words: list[str] | None) -> tuple[str | None, list[str]]:
    """Return the run file, None if the first word is a setting, and the settings."""
    words = words or []
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


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
