"""From what the source says and what was measured to one row of the verdict table.

A row is "exact" only when every case of every world came out below the tolerance, with the type as its config's own
defaults have it and with the features on that those leave off. Where something is off, the cause is
looked for in the source (positions, windows, masks, weights) and the number that showed it is kept in the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Protocol

from ithaca.verify.small_models.types import without_window
from ithaca.verify.small_models.variants import features_on
from tools.survey.run import Measured
from tools.survey.static import Look, sentence, static_cause

TOLERANCE = 1e-10
FEATURES_ON = "with what its config leaves off switched on"
Row = dict[str, Any]


class Measure(Protocol):
    """Runs one architecture on `world` ranks."""

    def __call__(self, world: int, kind: str, *, memory: bool = False, **overrides: Any) -> Measured: ...


def judge(seen: Look, measure: Measure, worlds: tuple[int, ...]) -> Row:
    """The verdict on one architecture; nothing runs where the source already rules it out."""
    ruled_out = static_cause(seen)
    if ruled_out:
        return _row(seen, "refused", *ruled_out)
    total = Measured()
    for world in worlds:
        measured = measure(world, seen.kind)
        if not is_exact(measured):
            cause, reason = explain(seen, measured, world)
            row = _row(seen, "refused", cause, reason, measured)
            without = _exact_without(seen.kind, cause, measured, partial(measure, world, seen.kind))
            return row | ({"exact_without": without} if without else {})
        total.add(measured)
    more = features_on(seen.kind)
    for world in worlds if more else ():
        measured = measure(world, seen.kind, **more)
        if not is_exact(measured):
            cause, reason = explain(seen, measured, world)
            return _row(seen, "refused", cause, f"{FEATURES_ON}: {reason}", measured)
        total.add(measured)
    return _row(seen, "exact", "", "parity", total) | {"memory": _memory(partial(measure, worlds[0], seen.kind), more)}


def _memory(measure: Callable[..., Measured], more: dict[str, Any]) -> str:
    """ "exact", or what went wrong with layers run again, as the type comes or with its features on."""
    for said, overrides in (("", {}), (f"{FEATURES_ON}: ", more)):
        measured = measure(memory=True, **overrides)
        if not is_exact(measured):
            where, number = _largest(measured)
            return said + (measured.failure or f"{where} off by {number:.0e}")
        if not more:
            break
    return "exact"


def is_exact(measured: Measured) -> bool:
    return measured.failure is None and measured.worst <= TOLERANCE


def explain(seen: Look, measured: Measured, world: int) -> tuple[str, str]:
    """Why a measurement failed, and in words with the number that shows it."""
    where, number = _largest(measured)
    shown = f"measured: {measured.failure or f'{where} off by {number:.0e} at sp={world}'}"
    cause, what = _cause(seen, measured)
    reason = sentence(cause, what or shown)
    return cause, reason if measured.failure or shown in reason else f"{reason} ({shown})"


def _cause(seen: Look, measured: Measured) -> tuple[str, str]:
    failure = measured.failure or ""
    if failure.startswith("building it"):
        return "no run", failure.removeprefix("building it: ")
    if "create_position_ids_from_input_ids" in seen.source:
        return "token positions", ""
    if "another FSDP group" in failure:
        return "tied embeddings", ""
    if "built an attention mask" in failure:
        return "bias", "a mask that it computes from the values"
    if _wrong_only_in(measured, "router loss"):
        return "router loss", ""
    if failure:
        return "measured", ""
    if _wrong_only_in(measured, "left-padded") and re.search(r"cumsum\(attention_mask", seen.source):
        return "mask positions", ""
    if "window" not in measured.features and "create_sliding_window_causal_mask" in seen.source:
        return "window in the mask", ""
    if measured.worst == inf:
        return "not finite", ""
    return "measured", ""


def _wrong_only_in(measured: Measured, case: str) -> bool:
    """Whether every other case ran and came out right."""
    cases = [key for key, error in measured.errors.items() if error > TOLERANCE]
    cases += [measured.failure] if measured.failure else []
    return bool(measured.errors) and all(key.startswith(case) for key in cases)


def _exact_without(kind: str, cause: str, measured: Measured, again: Callable[..., Measured]) -> str:
    """What has to be left out for this architecture to be exact, where one thing is all that is wrong with it."""
    if cause == "mask positions":
        return "left padding"
    if cause == "window in the mask" and is_exact(again(**without_window(kind))):
        return "window"
    return "router loss" if _wrong_only_in(measured, "router loss") else ""


def _largest(measured: Measured) -> tuple[str, float]:
    """The error to show: the first case that fails, its logits if they do."""
    for key, error in measured.errors.items():
        if error > TOLERANCE:
            case, part = key.split(": ")
            logits = measured.errors[f"{case}: logits"]
            return (f"{case}: logits", logits) if logits > TOLERANCE else (f"{case}: {part}", error)
    return "", 0.0


def _row(seen: Look, verdict: str, cause: str, reason: str, measured: Measured | None = None) -> Row:
    exact = verdict == "exact" and measured is not None
    return {
        "verdict": verdict,
        "cause": cause,
        "reason": reason,
        "classes": seen.cls,
        "worst": float(f"{measured.worst:.0e}") if exact and measured else None,
        "experts": seen.experts,
        "features": ", ".join(measured.features) if measured else "",
    }
