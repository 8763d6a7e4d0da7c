"""What is written down of a run: metrics.jsonl always, and accelerate's trackers where asked.

Only the first rank writes. A resumed run cuts off the lines of steps that it will take again, so the file reads as if
nothing had happened. A line is a record: `kind` is "step", "validation" or "event", `at` the clock's seconds.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from ithaca.config.schema import MetricsSettings
from ithaca.constants import GIB
from ithaca.errors import ConfigError
from ithaca.mesh import Mesh
from ithaca.planning.machine.hardware import find_device
from ithaca.training.run.json_lines import Lines

# Above this share of the device the next longer batch may not fit.
NEARLY_FULL = 0.75

logger = logging.getLogger("ithaca")


class Journal:
    """The run's record, on the rank that keeps it; on others it takes everything and writes nothing.

    A thread of its own writes the file: a disk that is slow or full holds no step up and ends no run.
    """

    def __init__(self, file: Path, settings: MetricsSettings, *, writes: bool, run: Mapping[str, Any]) -> None:
        self.file, self.writes = file, writes
        self.trackers = _trackers(settings, file.parent, run) if writes else []
        self._lines = Lines(file)
        self._writer = ThreadPoolExecutor(1, "ithaca journal")

    def resume(self, total: int) -> None:
        """Forget steps after `total`."""
        self.flush()
        if self.writes:
            self._lines.keep(lambda record: record["step"] <= total)

    def write(self, kind: str, step: int, **facts: Any) -> None:
        if not self.writes:
            return
        line = json.dumps(_finite({"kind": kind, "step": step, "at": round(time.time(), 3), **facts}))
        self._writer.submit(self._lines.append, line)
        numbers = {f"{kind}/{key}": value for key, value in _flat(facts).items()}
        for tracker in self.trackers:
            tracker.log(numbers, step=step)

    def flush(self) -> None:
        """Wait until all that was written is in the file."""
        if self.writes:
            self._writer.submit(lambda: None).result()

    def close(self) -> None:
        self._writer.shutdown()
        for tracker in self.trackers:
            tracker.finish()


def _finite(value: Any) -> Any:
    """JSON has no word for what is not a number, and none for infinity: null."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            numbers |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[prefix + key] = value
    return numbers


def _trackers(settings: MetricsSettings, folder: Path, run: Mapping[str, Any]) -> list[Any]:
    if not settings.trackers:
        return []
    from accelerate import PartialState, tracking

    # accelerate's trackers ask it who they are.
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


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What this rank holds between steps: weights and, from the first step on, the optimizer's state."""
    state = [x for states in optimizer.state.values() for x in states.values() if torch.is_tensor(x)]
    return {"weights": sum(map(_local_bytes, model.parameters())), "optimizer": sum(map(_local_bytes, state))}


def memory_by_kind(held: Mapping[str, int], mesh: Mesh) -> dict[str, float]:
    """GiB of this rank: what it holds, and the peak of all the rest with that since the last call."""
    kinds = dict(held)
    if mesh.device.type == "cuda":
        # All figures in one call: this is done every step.
        figures: Any = torch.cuda.memory_stats_as_nested_dict(mesh.device)
        peak, reserved = (figures[kind]["all"]["peak"] for kind in ("allocated_bytes", "reserved_bytes"))
        rest = max(0, peak - sum(kinds.values()))
        kinds |= {"gradients and activations": rest, "peak": peak, "reserved": reserved}
        torch.cuda.reset_peak_memory_stats(mesh.device)
    kinds["process"] = psutil.Process().memory_info().rss
    return {name: round(size / GIB, 3) for name, size in kinds.items()}


def _local_bytes(x: torch.Tensor) -> int:
    local: torch.Tensor = getattr(x, "_local_tensor", x)
    return local.nbytes


def full_share(memory: Mapping[str, float], mesh: Mesh) -> float:
    """How much of the device's memory the peak took; on the CPU, this rank's part of the host."""
    if mesh.device.type == "cuda":
        return memory["reserved"] * GIB / torch.cuda.get_device_properties(mesh.device).total_memory
    return memory["process"] * GIB * mesh.local_ranks / psutil.virtual_memory().total


def device_peak(mesh: Mesh) -> float | None:
    """FLOP/s of the card by its data sheet; None where there is no such figure."""
    if mesh.device.type != "cuda":
        return None
    try:
        return find_device(torch.cuda.get_device_name(mesh.device)).peak * 1e12
    except Exception:
        logger.info("no peak known for %s: utilisation is left out", torch.cuda.get_device_name(mesh.device))
        return None
