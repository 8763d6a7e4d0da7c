"""Settings of a run that is gone on with: which may change, what is said of it, and where the run stands then.

What a run learns from (model, data, seed, optimizer, and the length, batch and RoPE of a stage that has begun) stays as it
was; where and how it runs may change, and so may the course of a stage's rate, the number of its steps, stages that have
not begun, and stages behind them. A stage's steps can grow for as long as no step of the next one was taken: a run that had
ended goes on then. All functions here are of plain values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ithaca.config.schema import RunSettings, StageSettings
from ithaca.errors import ConfigError
from ithaca.training.run.progress import Place
from ithaca.training.schedule import rate_at

# What may differ when a run is resumed: where and how it runs, not what it learns.
_FREE = ("mesh", "memory", "checkpoints", "metrics", "limits", "launch", "output", "data.workers", "data.cache",
         "data.bad_share", "validation.sources", "validation.every", "validation.rows")  # fmt: skip
# In a stage its degree, the course of the rate and its end.
_RATE = ("lr", "schedule", "warmup", "final")
_COUNT = ("steps", "tokens")
_FREE_IN_STAGE = ("sp", *_RATE, *_COUNT)
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Change:
    """A setting by its name in the run file, and what it was and is."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} was {_shown(self.old)}, is {_shown(self.new)}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def changes(before: RunSettings, now: RunSettings) -> list[Change]:
    """Every setting in which two runs differ; a stage that one of them has not got is one setting."""
    old, new = (run.model_dump(mode="json") for run in (before, now))
    found = [change for key in old if key != "stages" for change in _in_section(key, old[key], new[key])]
    for at in range(max(len(old["stages"]), len(new["stages"]))):
        pair = [stages[at] if at < len(stages) else None for stages in (old["stages"], new["stages"])]
        found += _in_section(f"stages.{at}", *pair)
    return found


def _in_section(key: str, old: Any, new: Any) -> list[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [Change(f"{key}.{name}", old[name], new[name]) for name in old if old[name] != new[name]]
    return [Change(key, old, new)] if old != new else []


def refused(before: RunSettings, now: RunSettings, begun: int) -> list[Change]:
    """The changes by which a run would learn otherwise than its steps so far; `begun`: stages that have taken steps."""
    return [change for change in changes(before, now) if not _free(change.name, begun)]


def _free(name: str, begun: int) -> bool:
    first, _, rest = name.partition(".")
    if first != "stages":
        return first in _FREE or name in _FREE
    number, _, field = rest.partition(".")
    return int(number) >= begun or field in _FREE_IN_STAGE


def begun_stages(place: Place) -> int:
    """How many stages have taken steps."""
    return place.stage + (place.step > 0)


def settle_place(place: Place, run: RunSettings, ended: Sequence[int] | None = None) -> Place:
    """Where a run stands in stages whose steps may have changed; ConfigError where they cannot be as they are asked for.

    A stage that had ended and has more steps now is open again, unless the next one has begun. `ended`: the steps that
    each ended stage took; None for a checkpoint of an earlier version, when no stage's steps could change.
    """
    begun = begun_stages(place)
    if len(run.stages) < begun:
        raise ConfigError(
            f"stages has {len(run.stages)}, and this run has begun {begun}: put stages.{len(run.stages)} back, or set "
            "output=... to a new folder"
        )
    if not begun:
        return place
    counts, last = [stage.count for stage in run.stages], begun - 1
    taken = [*(ended or [*counts[: place.stage - 1], place.total - place.step - sum(counts[: place.stage - 1])])]
    taken = [*taken[: place.stage], place.step][:begun]
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
    if place.step == 0 and counts[last] > taken[last]:
        return replace(place, stage=last, step=taken[last], taken=max(1, place.taken))
    return place


def advise_changes(before: RunSettings, now: RunSettings, place: Place) -> list[str]:
    """What is said of changes by which the rate takes another course than the run so far was to have.

    `place`: where the run stands, `settle_place` done.
    """
    told = [str(change) for change in changes(before, now) if _in_course(change.name)]
    told = [each for each in told if int(each.split(".")[1]) < min(len(before.stages), len(now.stages))]
    known = place.stage < min(len(before.stages), len(now.stages))
    if told and known and 0 < place.step < now.stages[place.stage].count:
        told[-1] += f"; {_course(before.stages, now.stages, place)}"
    return told


def _in_course(name: str) -> bool:
    return name.startswith("stages.") and name.rpartition(".")[2] in (*_RATE, *_COUNT)


def _course(before: Sequence[StageSettings], now: Sequence[StageSettings], place: Place) -> str:
    """What the rate does from here on."""
    was = rate_at(before, place.stage, place.step - 1)
    rates = [rate_at(now, place.stage, step) for step in range(place.step, now[place.stage].count)]
    ends = f"{rates[0]:.3g} at step {place.step + 1}"
    if len(rates) > 1:
        ends += f" to {rates[-1]:.3g} at step {now[place.stage].count}"
    rises = ", above the rate before it" if rates[0] > 1.05 * was else ""
    return (
        f"stage {place.stage + 1} goes on with the {now[place.stage].schedule} schedule of all its steps: {ends}{rises}"
    )
