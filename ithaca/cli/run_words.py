"""The words of verbs that take a run: `ithaca train [RUN.YAML] [KEY.SUB=VALUE]...`.

`--steps 200` is refused with the setting to type: stages.0.steps=200.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from ithaca.errors import ConfigError, IthacaError

if TYPE_CHECKING:
    from ithaca.config.schema import RunSettings

# Keys of the default stage that leave its length to the model.
_FREE = ("steps", "tokens", "batch", "lr", "schedule", "warmup", "final", "sp")


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
