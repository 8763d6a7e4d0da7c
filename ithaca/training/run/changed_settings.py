"""Settings that differ when a run is resumed: which may change, the warnings, and the progress to resume from.

    must stay      model, data, seed, optimizer; length, batch and RoPE of a stage that has begun
    may change     where and how the run runs (`_FREE`); learning rate and number of steps of a stage; later stages

A stage's steps can grow as long as the next stage has taken no step: a run that had ended then goes on. All functions
here are of plain values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ithaca.config.schema import RunSettings, StageSettings
from ithaca.errors import ConfigError
from ithaca.training.run.progress import RunProgress
from ithaca.training.schedule import rate_at

# Sections and settings by which a run learns nothing else.
_FREE = ("mesh", "memory", "checkpoints", "metrics", "limits", "launch", "output", "data.workers", "data.cache",
         "data.bad_share", "validation.sources", "validation.every", "validation.rows")  # fmt: skip
_LEARNING_RATE = ("lr", "schedule", "warmup", "final")
_DURATION = ("steps", "tokens")
_FREE_IN_STAGE = ("sp", *_LEARNING_RATE, *_DURATION)
_LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """A setting by its name in the run file, with its old and its new value."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} was {_shorten(self.old)}, is {_shorten(self.new)}"


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def changed_settings(before: RunSettings, now: RunSettings) -> list[ChangedSetting]:
    """Return every setting in which two runs differ; a stage that only one of the runs has is one setting."""
    old, new = (run.model_dump(mode="json") for run in (before, now))
    found = [change for key in old if key != "stages" for change in _in_section(key, old[key], new[key])]
    for at in range(max(len(old["stages"]), len(new["stages"]))):
        pair = [stages[at] if at < len(stages) else None for stages in (old["stages"], new["stages"])]
        found += _in_section(f"stages.{at}", *pair)
    return found


def _in_section(key: str, old: Any, new: Any) -> list[ChangedSetting]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [ChangedSetting(f"{key}.{name}", old[name], new[name]) for name in old if old[name] != new[name]]
    return [ChangedSetting(key, old, new)] if old != new else []


def refused_changes(before: RunSettings, now: RunSettings, begun: int) -> list[ChangedSetting]:
    """Return the changes that a resumed run refuses; `begun`: number of stages that have taken steps."""
    return [change for change in changed_settings(before, now) if not _may_change(change.name, begun)]


def _may_change(name: str, begun: int) -> bool:
    first, _, rest = name.partition(".")
    if first != "stages":
        return first in _FREE or name in _FREE
    number, _, field = rest.partition(".")
    return int(number) >= begun or field in _FREE_IN_STAGE


def resumed_progress(progress: RunProgress, run: RunSettings, ended: Sequence[int] | None = None) -> RunProgress:
    """Return the progress in stages whose number of steps may have changed; ConfigError if a change is impossible.

    A stage that had ended and has more steps now is open again, unless the next stage has begun. `ended`: the steps
    that each ended stage took; None for a checkpoint of an earlier version, when no stage's steps could change.
    """
    begun = progress.begun_stages
    if len(run.stages) < begun:
        raise ConfigError(
            f"stages has {len(run.stages)}, and this run has begun {begun}: put stages.{len(run.stages)} back, or set "
            "output=... to a new folder"
        )
    if not begun:
        return progress
    counts, last = [stage.count for stage in run.stages], begun - 1
    if not ended:
        before_last = counts[: progress.stage - 1]
        ended = [*before_last, progress.total - progress.step - sum(before_last)]
    taken = [*ended[: progress.stage], progress.step][:begun]
    for at in range(last):
        if counts[at] != taken[at]:
            raise ConfigError(
                f"stages.{at} took {taken[at]} steps before stages.{at + 1} began, and {counts[at]} are asked for: use "
                f"stages.{at}.steps={taken[at]}, or set output=... to a new folder (those of stages.{last} may grow)"
            )
    if counts[last] < taken[last]:
        raise ConfigError(
            f"stages.{last} has taken {taken[last]} steps and {counts[last]} are asked for: steps that were taken stay; use "
            f"stages.{last}.steps={taken[last]} or more, or set output=... to a new folder"
        )
    if progress.step == 0 and counts[last] > taken[last]:
        return replace(progress, stage=last, step=taken[last], taken=max(1, progress.taken))
    return progress


def describe_rate_changes(before: RunSettings, now: RunSettings, progress: RunProgress) -> list[str]:
    """Return a warning for each changed setting of the learning-rate schedule; `progress`: from `resumed_progress`."""
    stages = min(len(before.stages), len(now.stages))
    warnings = []
    for change in changed_settings(before, now):
        first, _, rest = change.name.partition(".")
        number, _, field = rest.partition(".")
        if first == "stages" and field in (*_LEARNING_RATE, *_DURATION) and int(number) < stages:
            warnings.append(str(change))
    if warnings and progress.stage < stages and 0 < progress.step < now.stages[progress.stage].count:
        warnings[-1] += f"; {_describe_rate(before.stages, now.stages, progress)}"
    return warnings


def _describe_rate(before: Sequence[StageSettings], now: Sequence[StageSettings], progress: RunProgress) -> str:
    """Describe the learning rate from the next step to the end of the stage."""
    was = rate_at(before, progress.stage, progress.step - 1)
    stage = now[progress.stage]
    first = rate_at(now, progress.stage, progress.step)
    text = f"{first:.3g} at step {progress.step + 1}"
    if progress.step + 1 < stage.count:
        text += f" to {rate_at(now, progress.stage, stage.count - 1):.3g} at step {stage.count}"
    rises = ", above the rate before it" if first > 1.05 * was else ""
    return f"stage {progress.stage + 1} goes on with the {stage.schedule} schedule of all its steps: {text}{rises}"
