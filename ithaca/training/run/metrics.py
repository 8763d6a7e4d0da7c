"""`Journal`: the metrics of a run, in metrics.jsonl and in accelerate's trackers (TensorBoard, wandb, trackio).

    {"kind": "step", "step": 12, "at": 1700000000.0, "loss": 2.31, "tokens_per_second": 51200.0, ...}

`kind` is "step", "validation" or "event"; `at` is the time in seconds. A resumed run removes the lines of steps that
the run takes again. Only rank 0 writes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ithaca.config.schema import MetricsSettings
from ithaca.errors import ConfigError
from ithaca.training.run.json_lines import JsonLines


class Journal:
    """The metrics of a run: `writes` is True on rank 0, and other ranks write nothing.

    A thread writes the file, so that a slow disk delays no step and a full disk ends no run.
    """

    def __init__(self, file: Path, settings: MetricsSettings, *, writes: bool, run: Mapping[str, Any]) -> None:
        self.file, self.writes = file, writes
        self.trackers = _trackers(settings, file.parent, run) if writes else []
        self._lines = JsonLines(file)
        self._writer = ThreadPoolExecutor(1, "ithaca journal")

    def resume(self, total: int) -> None:
        """Remove the lines of steps after `total`."""
        self.flush()
        if self.writes:
            self._lines.keep(lambda record: record["step"] <= total)

    def write(self, kind: str, step: int, **facts: Any) -> None:
        if not self.writes:
            return
        line = json.dumps(_finite({"kind": kind, "step": step, "at": round(time.time(), 3), **facts}))
        self._writer.submit(self._lines.append, line)
        numbers = {f"{kind}/{key}": value for key, value in _flatten(facts).items()}
        for tracker in self.trackers:
            tracker.log(numbers, step=step)

    def flush(self) -> None:
        """Wait until every line is in the file."""
        if self.writes:
            self._writer.submit(lambda: None).result()

    def close(self) -> None:
        self._writer.shutdown()
        for tracker in self.trackers:
            tracker.finish()


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return all numbers of nested facts, named by their path: `memory_gib/peak`."""
    numbers: dict[str, float] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            numbers |= _flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[prefix + key] = value
    return numbers


def _trackers(settings: MetricsSettings, folder: Path, run: Mapping[str, Any]) -> list[Any]:
    if not settings.trackers:
        return []
    from accelerate import PartialState, tracking

    # accelerate's trackers read the rank from this singleton.
    PartialState(cpu=not torch.cuda.is_available())
    made = []
    for name in settings.trackers:
        kind: Any = tracking.LOGGER_TYPE_TO_CLASS[name]
        try:
            where = {"logging_dir": folder / "tensorboard"} if kind.requires_logging_directory else {}
            extra = {"dir": str(folder)} if name == "wandb" else {}
            made.append(kind(settings.project, **where, **extra))
            made[-1].start()
        except ImportError as error:
            raise ConfigError(f"metrics.trackers has {name!r}, which is not installed: pip install {name}") from error
        except Exception as error:
            hint = "log in with `wandb login`, or set WANDB_MODE=offline" if name == "wandb" else "see to it"
            raise ConfigError(
                f"metrics.trackers has {name!r}, which does not start ({' '.join(str(error).split())}): {hint}, or leave "
                "it out"
            ) from error
        made[-1].store_init_configuration({key: str(value) for key, value in run.items()})
    return made
