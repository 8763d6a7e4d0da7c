"""Command lines of verbs that take settings: `--steps 200` is refused with the setting to type, stages.0.steps=200."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from ithaca.errors import ConfigError


class TakesSettings(TyperCommand):
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
            if typed := _typed(option[2:], value if given else following):
                raise ConfigError(f"{option} is no option of {self.name}: settings have no dashes, type {typed}")
        return super().parse_args(ctx, args)


def _typed(option: str, value: str) -> str:
    """Return the settings that an unknown option may mean, as they are typed; empty if none is near."""
    from ithaca.config.messages import places_of
    from ithaca.config.schema import Run

    places = places_of(Run, option.replace("-", "_"))
    return " or ".join(f"{place}={'...' if '=' in value else value}" for place in places[:4])
