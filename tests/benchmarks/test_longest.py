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


def test_longest_step_is_saved_part_by_part() -> None:
    kept: list[dict[str, Any]] = []
    longest.measured(cell(2), torch.device("cpu"), kept.append)
    assert [k["outcome"] for k in kept] == ["not done"] * 4 + ["done"]
    last = kept[-1]
    assert last["seconds"] == pytest.approx(last["forward_s"] + last["backward_s"] + last["optimizer_s"])
    assert last["tokens"] == 96
    assert last["plan"].startswith("2 keep")
    assert "tiny | 96" in longest.table({"cells": [cell(2) | last]})


def test_longest_out_of_memory_keeps_reached_parts() -> None:
    kept: list[dict[str, Any]] = []
    with patch.object(torch.autograd, "backward", side_effect=torch.OutOfMemoryError("out of memory")):
        longest.measured(cell(2), torch.device("cpu"), kept.append)
    assert kept[-1]["outcome"] == "out of memory"
    assert "forward_s" in kept[-1]
    assert "| out of memory |" in longest.table({"cells": [cell(2) | kept[-1]]})


def test_longest_whole_time_follows_from_one_layer() -> None:
    kept: list[dict[str, Any]] = []
    longest.measured(cell(1), torch.device("cpu"), kept.append)
    run = cell(1) | kept[-1]
    assert run["outcome"] == "done", run
    assert run["plan"].startswith("1 save")
    layers = longest.SHAPES["tiny"].layers
    assert run["whole"]["modes"] == {"keep": layers}
    [whole] = longest.derived({"cells": [run]})
    assert whole["at_most"]
    assert whole["seconds"] < layers * run["seconds"]
    assert "at most" in longest.table({"cells": [run]})
    # Layers that attend again cost a forward pass of attention each.
    again = run | {"whole": run["whole"] | {"modes": {"save": 1, "recompute": layers - 1}}}
    assert longest.derived({"cells": [again]})[0]["seconds"] > whole["seconds"]
    # The head, once it was measured, counts once.
    head = {"tiny": {"seconds_per_token": longest.head_seconds(longest.SHAPES["tiny"], torch.device("cpu")) / 100}}
    saved = run | {"whole": run["whole"] | {"modes": {"save": layers}}}
    [bound], [exact] = longest.derived({"cells": [saved]}), longest.derived({"cells": [saved], "heads": head})
    assert exact["seconds"] < bound["seconds"]
    assert "s, derived from 1 layer |" in longest.table({"cells": [run], "heads": head})
    assert "at most" not in longest.table({"cells": [run], "heads": head})
    assert not longest.derived({"cells": [cell(2, outcome="done", seconds=1.0)]})
