"""`benchmarks.longest`: a whole step on the CPU, a failure that is kept, and a time derived from fewer layers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import longest


def cell(layers: int, **more: Any) -> dict[str, Any]:
    settings = {"optimizer": "adamw", "budget_gib": None, "layers": layers}
    return {"system": "ithaca", "model": "tiny", "length": 96, "settings": settings} | more


def test_a_step_is_kept_part_by_part() -> None:
    kept: list[dict[str, Any]] = []
    longest.measured(cell(2), torch.device("cpu"), kept.append)
    assert [k["outcome"] for k in kept] == ["not done"] * 4 + ["done"]
    last = kept[-1]
    assert last["seconds"] == pytest.approx(last["forward_s"] + last["backward_s"] + last["optimizer_s"])
    assert last["tokens"] == 96
    assert last["plan"].startswith("2 keep")
    assert "tiny | 96" in longest.table([cell(2) | last])


def test_what_was_reached_is_kept_when_memory_ends() -> None:
    kept: list[dict[str, Any]] = []
    with patch.object(torch.Tensor, "backward", side_effect=torch.OutOfMemoryError("out of memory")):
        longest.measured(cell(2), torch.device("cpu"), kept.append)
    assert kept[-1]["outcome"] == "out of memory"
    assert "forward_s" in kept[-1]
    assert "| out of memory |" in longest.table([cell(2) | kept[-1]])


def test_a_whole_models_time_follows_from_two_runs() -> None:
    shape = {**longest.SHAPES, "tiny": longest.replace(longest.SHAPES["tiny"], layers=10)}
    runs = [cell(n, outcome="done", seconds=1.0 + 2 * n, plan="", pinned_gib=0.0) for n in (1, 3)]
    with patch.object(longest, "SHAPES", shape):
        [whole] = longest.derived(runs)
        assert whole["seconds"] == pytest.approx(21.0)
        assert "21.0 s, derived from 1 and 3 layers" in longest.table(runs)
        assert not longest.derived(runs[:1])
        assert not longest.derived([*runs, cell(10, outcome="done", seconds=20.0)])
