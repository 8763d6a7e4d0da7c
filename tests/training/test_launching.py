"""On a GPU: the trainer launches every kind of step without waiting for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ithaca.training import loop
from ithaca.training.trainer import train
from tests.training.runs import documents, metrics, small_run, tiny_model

# Kernels are compiled and chosen, and memory is pinned, in the first steps.
WARM = 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
# torch's compiler warns of its own doings as it compiles; waiting for the device raises whatever the filter.
@pytest.mark.filterwarnings("default")
def test_launched_step_does_not_wait_for_device(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model", hidden_size=256)
    documents(tmp_path / "texts")
    # Every other step also records its time by part and its loss by position.
    run = small_run(tmp_path, "run", launch={"device": "cuda"}, metrics={"apart_every": 2})
    step, counted = loop.StageLoop.launch, []

    def watched(self: loop.StageLoop, progress: Any, spans: Any) -> Any:
        if progress.total < WARM:
            return step(self, progress, spans)
        torch.cuda.set_sync_debug_mode("error")
        try:
            counted.append(progress.total)
            return step(self, progress, spans)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    try:
        with patch.object(loop.StageLoop, "launch", watched):
            assert train(run).finished
    finally:
        dist.destroy_process_group()
    assert len(counted) == 12 - WARM
    apart = [line["loss_by_position"] for line in metrics(run) if "loss_by_position" in line]
    assert len(apart) == 6
