"""The picture of a run's loss: every step, a running mean, validation, and where stages begin; made from metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ithaca.errors import DataError


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without lines that were cut short or are no records."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): the run's checkpoints do not need it") from None
    lines = []
    for text in data.split(b"\n"):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and all(type(line.get(key)) in kinds for key, kinds in _needed(line).items()):
            lines.append(line)
    return lines


def _needed(line: dict[str, Any]) -> dict[str, tuple[type, ...]]:
    """Return the keys that a record of this kind must have, with their types."""
    needed: dict[str, tuple[type, ...]] = {"kind": (str,), "step": (int,)}
    if line.get("kind") in ("step", "validation"):
        needed["loss"] = (int, float, type(None))
    return needed | ({"stage": (int,), "length": (int,)} if line.get("kind") == "step" else {})


def draw_loss(metrics: Path, picture: Path) -> None:
    """Draw the losses of a metrics file into a picture (PNG)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    steps = [line for line in lines if line["kind"] == "step"]
    if not steps:
        raise DataError(f"{metrics} has no steps: there is nothing to draw yet")
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    numbers, losses = [line["step"] for line in steps], [_number(line["loss"]) for line in steps]
    axes.plot(numbers, losses, color="0.75", linewidth=1, label="loss")
    axes.plot(numbers, _running(losses), color="C0", linewidth=2, label="running mean")
    held_out = [line for line in lines if line["kind"] == "validation"]
    if held_out:
        at, values = [line["step"] for line in held_out], [_number(line["loss"]) for line in held_out]
        axes.plot(at, values, "o-", color="C1", markersize=4, label="validation")
    _mark_stages(axes, steps)
    axes.set(xlabel="step", ylabel="loss a token", xlim=(numbers[0], max(numbers[-1], numbers[0] + 1)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    try:
        figure.savefig(picture, dpi=150)
    except OSError as error:
        raise DataError(f"{picture} could not be drawn ({error.strerror or error}): make room there") from None


def _number(loss: float | None) -> float:
    """Return the loss, or NaN for null: a loss that was no number is drawn as a gap."""
    return float("nan") if loss is None else loss


def _mark_stages(axes: Any, steps: list[dict[str, Any]]) -> None:
    starts = {line["stage"]: line for line in reversed(steps)}
    for line in starts.values():
        axes.axvline(line["step"], color="0.5", linewidth=0.8, linestyle=":")
        axes.annotate(
            f" {line['length']:,} tokens", (line["step"], 1), xycoords=("data", "axes fraction"), va="top", fontsize=8
        )


def _running(losses: list[float]) -> list[float]:
    """Return an exponential mean over about ten steps, corrected for its start."""
    mean, weight, means = 0.0, 0.0, []
    for loss in losses:
        if loss == loss and abs(loss) != float("inf"):
            mean, weight = 0.9 * mean + 0.1 * loss, 0.9 * weight + 0.1
        means.append(mean / weight if weight else loss)
    return means
