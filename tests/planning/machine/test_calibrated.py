"""Measured figures of a machine: kept, read back, laid over the table of cards; and the measuring itself, small."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.errors import ConfigError, UnsupportedError
from ithaca.machine.calibrate import TrialSizes, measure, this_card
from ithaca.planning.machine.calibrated import Measured, read_measured, with_measured, write_measured
from ithaca.planning.machine.hardware import DEVICES, AttentionSpeed, find_device

SPEEDS = (AttentionSpeed(128, 32_768, 500.0, 400.0),)
H100 = Measured("NVIDIA H100 80GB HBM3", 85 * 10**9, 600.0, SPEEDS, 2900.0, 50.0, "2.11.0")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "calibration.json"
    assert read_measured(file) is None
    write_measured(file, H100)
    assert read_measured(file) == H100
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_measured_figures_take_the_place_of_the_data_sheets() -> None:
    cards = with_measured(DEVICES, H100)
    own = find_device("h100", cards)
    assert own.measured
    assert (own.matmul, own.attention, own.bandwidth, own.host_copy) == (600.0, SPEEDS, 2900.0, 50.0)
    # Another card of the family is untouched, and memory stays the table's.
    assert find_device("H100 PCIe", cards) is find_device("H100 PCIe")
    assert own.memory == find_device("h100").memory
    assert with_measured(DEVICES, None) == DEVICES


def test_an_unknown_card_joins_the_table() -> None:
    cards = with_measured(DEVICES, Measured("NVIDIA GH200 480GB", 95 * 10**9, 700.0, SPEEDS, 3500.0, 300.0, "2.11.0"))
    found = find_device("NVIDIA GH200 480GB", cards)
    assert found.measured
    assert found.memory == 95 * 10**9
    assert 900 < found.peak < 1100
    assert find_device("H200", cards).name == "H200"


@pytest.mark.parametrize(
    "change",
    [
        {"matmul": "fast"},
        {"matmul": 0},
        {"attention": []},
        {"attention": [{"head_size": 1}]},
        {"name": None, "memory": "x"},
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({**asdict(H100), **change}))
    with pytest.raises(ConfigError, match=r"calibration\.json is no calibration.*--calibrate"):
        read_measured(file)
    file.write_text("{")
    with pytest.raises(ConfigError):
        read_measured(file)


def test_measuring_gives_every_figure() -> None:
    small = TrialSizes(attention=((64, 64),), heads=(2, 1), product=(2, 8, 8), copied=2**16, window=0.0)
    measured = measure(torch.device("cpu"), small)
    assert measured.torch == torch.__version__
    figures = [measured.matmul, measured.bandwidth, measured.host_copy, measured.attention[0].forward]
    assert min(*figures, measured.attention[0].backward) > 0


def test_without_a_gpu_there_is_nothing_to_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="no GPU here"):
        this_card()
