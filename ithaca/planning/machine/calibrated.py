"""A machine's own measured speeds, kept as a small JSON file and used in place of a data sheet's.

`machine/calibrate.py` measures; this file writes and reads the figures and puts them over the table of cards. Invariant:
a file holds numbers of the table's own kinds, or is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ithaca.atomic import write_whole
from ithaca.errors import ConfigError, UnsupportedError
from ithaca.planning.machine.hardware import H200, AttentionSpeed, Device, find_device, words_of


@dataclass(frozen=True, slots=True)
class Measured:
    """One card as measured here; units as in the table of cards. `torch` is the version that ran the kernels."""

    name: str
    memory: int
    matmul: float
    attention: tuple[AttentionSpeed, ...]
    bandwidth: float
    host_copy: float
    torch: str


def write_measured(file: Path, measured: Measured) -> None:
    """Write the file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(asdict(measured), indent=1) + "\n")


def read_measured(file: Path) -> Measured | None:
    """Return the figures measured here before; None if there are none."""
    if not file.exists():
        return None
    try:
        return _parsed(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} is no calibration ({type(error).__name__}: {error}): run `ithaca plan --calibrate` again, or delete it"
        ) from None


def _parsed(content: Mapping[str, Any]) -> Measured:
    speeds = [
        AttentionSpeed(int(s["head_size"]), int(s["length"]), float(s["forward"]), float(s["backward"]))
        for s in content["attention"]
    ]
    figures = {name: float(content[name]) for name in ("matmul", "bandwidth", "host_copy")}
    every = [*figures.values(), *(value for s in speeds for value in (s.length, s.forward, s.backward))]
    if not speeds or min(every) <= 0:
        raise ValueError("every speed must be above 0")
    return Measured(
        str(content["name"]), int(content["memory"]), attention=tuple(speeds), torch=str(content["torch"]), **figures
    )


def with_measured(devices: Sequence[Device], measured: Measured | None) -> tuple[Device, ...]:
    """Return the table of cards with the measured card's own speeds; a card that is not in the table is added."""
    if measured is None:
        return tuple(devices)
    try:
        known = find_device(measured.name, devices)
    except UnsupportedError:
        # The peak is not measured: an H200's share of its own stands in for it.
        peak = measured.matmul * H200.peak / H200.matmul
        known = replace(H200, name=measured.name, words=words_of(measured.name), memory=measured.memory, peak=peak)
        devices = (*devices, known)
    own = replace(
        known,
        matmul=measured.matmul,
        attention=measured.attention,
        bandwidth=measured.bandwidth,
        host_copy=measured.host_copy,
        measured=True,
    )
    return tuple(own if device is known else device for device in devices)
