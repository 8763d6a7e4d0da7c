"""Verdicts: one row of the table from a type's source and from its parity runs.

    source rules the type out ------------------------------> refused, nothing runs
    a case of a run is off by features than 1e-10, or fails ----> refused, with cause and number
    every case is exact, with and without optional features > exact

Each type runs as its config's defaults have it, and again with the features that the defaults leave off. If a case is off,
the cause is looked for in the source (positions, windows, masks, weights), and the reason keeps the measured number.
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
from tools.survey.static import ArchitectureSource, sentence, static_cause

TOLERANCE = 1e-10
FEATURES_ON = "with what its config leaves off switched on"
Row = dict[str, Any]


class Measure(Protocol):
    """Runs one architecture on `world` ranks."""

    def __call__(self, world: int, kind: str, *, memory: bool = False, **overrides: Any) -> Measured: ...


def judge(source: ArchitectureSource, measure: Measure, worlds: tuple[int, ...]) -> Row:
    """Return the row of one architecture; nothing runs if the source already rules the architecture out."""
    ruled_out = static_cause(source)
    if ruled_out:
        return _row(source, "refused", *ruled_out)
    total = Measured()
    for world in worlds:
        measured = measure(world, source.kind)
        if not is_exact(measured):
            cause, reason = explain(source, measured, world)
            row = _row(source, "refused", cause, reason, measured)
            without = _exact_without(source.kind, cause, measured, partial(measure, world, source.kind))
            return row | ({"exact_without": without} if without else {})
        total.add(measured)
    features = features_on(source.kind)
    for world in worlds if features else ():
        measured = measure(world, source.kind, **features)
        if not is_exact(measured):
            cause, reason = explain(source, measured, world)
            return _row(source, "refused", cause, f"{FEATURES_ON}: {reason}", measured)
        total.add(measured)
    return _row(source, "exact", "", "parity", total) | {
        "memory": _memory(partial(measure, worlds[0], source.kind), features)
    }


def _memory(measure: Callable[..., Measured], features: dict[str, Any]) -> str:
    """Return "exact", or the error of replayed layers, with the type's defaults or with its features on."""
    for prefix, overrides in (("", {}), (f"{FEATURES_ON}: ", features)):
        measured = measure(memory=True, **overrides)
        if not is_exact(measured):
            where, number = _largest(measured)
            return prefix + (measured.failure or f"{where} off by {number:.0e}")
        if not features:
            break
    return "exact"


def is_exact(measured: Measured) -> bool:
    return measured.failure is None and measured.worst <= TOLERANCE


def explain(source: ArchitectureSource, measured: Measured, world: int) -> tuple[str, str]:
    """Return the cause of a failed measurement, and a sentence with the measured number."""
    where, number = _largest(measured)
    shown = f"measured: {measured.failure or f'{where} off by {number:.0e} at sp={world}'}"
    cause, what = _cause(source, measured)
    reason = sentence(cause, what or shown)
    return cause, reason if measured.failure or shown in reason else f"{reason} ({shown})"


def _cause(source: ArchitectureSource, measured: Measured) -> tuple[str, str]:
    failure = measured.failure or ""
    if failure.startswith("building it"):
        return "no run", failure.removeprefix("building it: ")
    if "create_position_ids_from_input_ids" in source.text:
        return "token positions", ""
    if "another FSDP group" in failure:
        return "tied embeddings", ""
    if "built an attention mask" in failure:
        return "bias", "a mask that it computes from the values"
    if _wrong_only_in(measured, "router loss"):
        return "router loss", ""
    if failure:
        return "measured", ""
    if _wrong_only_in(measured, "left-padded") and re.search(r"cumsum\(attention_mask", source.text):
        return "mask positions", ""
    if "window" not in measured.features and "create_sliding_window_causal_mask" in source.text:
        return "window in the mask", ""
    if measured.worst == inf:
        return "not finite", ""
    return "measured", ""


def _wrong_only_in(measured: Measured, case: str) -> bool:
    """True if cases of this name fail and no others."""
    cases = [key for key, error in measured.errors.items() if error > TOLERANCE]
    cases += [measured.failure] if measured.failure else []
    return bool(measured.errors) and all(key.startswith(case) for key in cases)


def _exact_without(kind: str, cause: str, measured: Measured, measure_again: Callable[..., Measured]) -> str:
    """Return the only feature without which the architecture is exact; an empty string if there is no such feature."""
    if cause == "mask positions":
        return "left padding"
    if cause == "window in the mask" and is_exact(measure_again(**without_window(kind))):
        return "window"
    return "router loss" if _wrong_only_in(measured, "router loss") else ""


def _largest(measured: Measured) -> tuple[str, float]:
    """Return the error to report: the first case that fails, and of that case the logits' error if they fail."""
    for key, error in measured.errors.items():
        if error > TOLERANCE:
            case, part = key.split(": ")
            logits = measured.errors[f"{case}: logits"]
            return (f"{case}: logits", logits) if logits > TOLERANCE else (f"{case}: {part}", error)
    return "", 0.0


def _row(source: ArchitectureSource, verdict: str, cause: str, reason: str, measured: Measured | None = None) -> Row:
    exact = verdict == "exact" and measured is not None
    return {
        "verdict": verdict,
        "cause": cause,
        "reason": reason,
        "classes": source.cls,
        "worst": float(f"{measured.worst:.0e}") if exact and measured else None,
        "experts": source.experts,
        "features": ", ".join(measured.features) if measured else "",
    }
