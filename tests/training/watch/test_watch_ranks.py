"""The watch over gloo: signals to one rank, in forward, in backward, in a long layer and inside an exchange."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ithaca.loss.causal import causal_loss
from ithaca.mesh import Mesh, init_mesh
from ithaca.models.support import decoder_layers
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.training.watch.watch import Preempted, Watch
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import RankError, run_ranks

MODES = ("keep", "recompute", "rebuild", "save")
PLAN = MemoryPlan(MODES, tuple(mode != "keep" for mode in MODES), 5, 4, 2)


def _model(memory: MemoryPlan | None) -> tuple[Mesh, Any, dict[str, Any]]:
    mesh = init_mesh(sp=2)
    model = small_model("llama", num_hidden_layers=len(MODES)).float()
    return mesh, parallelize(model, mesh, memory=memory), small_batch(1, 24, seed=mesh.dp_rank)


def _still_together(mesh: Mesh) -> float:
    """Run a collective after the stop; ranks that stopped apart would meet another collective, or none."""
    number = torch.tensor([float(mesh.rank + 1)])
    dist.all_reduce(number, group=mesh.world_group)
    return number.item()


def _stopped(label: str, memory: MemoryPlan | None, pause: float) -> tuple[str, int, float]:
    """Train until rank 1, and it alone, is sent SIGTERM at `label` of the third step, where it then stays a while."""
    mesh, model, batch = _model(memory)
    with Watch.of(mesh, hang=60) as watch:
        at = watch.pass_boundary

        def hurt(reached: str) -> None:
            at(reached)
            if mesh.rank == 1 and step == 2 and reached == label:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(pause)

        watch.pass_boundary = hurt  # type: ignore[method-assign]
        watch.install(decoder_layers(model))
        try:
            for step in range(200):
                watch.pass_boundary(f"step {step}")
                causal_loss(model, batch, mesh).backward()
                model.zero_grad()
        except Preempted as stop:
            return str(stop), watch.count, _still_together(mesh)
    raise AssertionError("nobody stopped")


@pytest.mark.parametrize("label", ["forward layer 1", "backward layer 2", "step 2"])
@pytest.mark.parametrize("memory", [PLAN, None], ids=["replayed", "plain"])
def test_signal_to_one_rank_stops_all_at_one_boundary(label: str, memory: MemoryPlan | None) -> None:
    outcomes = run_ranks(2, _stopped, label, memory, 0.0)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] == 3.0


@pytest.mark.parametrize("label", [pytest.param("forward layer 1", marks=pytest.mark.slow), "backward layer 2"])
def test_signal_in_long_layer_stops_at_next_layer(label: str) -> None:
    outcomes = run_ranks(2, _stopped, label, PLAN, 1.5)
    assert outcomes[0] == outcomes[1]
    following = {"forward layer 1": "forward layer 2", "backward layer 2": "backward layer 1"}[label]
    assert outcomes[0][0] == f"stopped at '{following}'"


@pytest.mark.slow
def test_signal_over_two_groups_stops_four_ranks_at_one_boundary() -> None:
    outcomes = run_ranks(4, _stopped, "backward layer 2", PLAN, 0.5)
    assert len({outcome[:2] for outcome in outcomes}) == 1
    assert outcomes[0][2] == 10.0


def _inside_an_exchange() -> tuple[bool, str, int]:
    """Send SIGTERM to rank 0 inside an all-to-all; its peer sees the request before it joins."""
    mesh = init_mesh(sp=2)
    with Watch.of(mesh, hang=60) as watch:
        heard = False
        try:
            for step in range(200):
                watch.pass_boundary(f"layer {step}")
                if step == 3 and mesh.rank == 0:
                    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
                if step == 3 and mesh.rank == 1:
                    time.sleep(2)
                    heard = watch.stop_requested
                given = torch.arange(4.0)
                dist.all_to_all_single(torch.empty_like(given), given, group=mesh.sp_group)
        except Preempted as stop:
            return heard, str(stop), watch.count
    raise AssertionError("nobody stopped")


def test_signal_inside_exchange_reaches_peer() -> None:
    first, second = run_ranks(2, _inside_an_exchange)
    assert second[0], "rank 1 had not heard of the signal that rank 0 got inside the exchange"
    assert first[1:] == second[1:] == ("stopped at 'layer 4'", 5)


def _labels() -> list[str]:
    mesh, model, batch = _model(PLAN)
    watch = Watch.of(mesh)
    labels: list[str] = []
    watch.pass_boundary = labels.append  # type: ignore[method-assign]
    remove = watch.install(decoder_layers(model))
    causal_loss(model, batch, mesh).backward()
    remove()
    causal_loss(model, batch, mesh).backward()
    return labels


def test_recomputed_layer_makes_no_boundary() -> None:
    forward = [f"forward layer {index}" for index in range(4)]
    backward = [f"backward layer {index}" for index in reversed(range(4))]
    assert run_ranks(2, _labels) == [forward + backward] * 2


def _one_fails() -> None:
    mesh = init_mesh(sp=2)
    with Watch.of(mesh) as watch:
        watch.pass_boundary("step")
        if mesh.rank == 1:
            raise KeyError("a bad row")
        time.sleep(60)  # not in a collective, which would see its peer leave


@pytest.mark.slow
def test_failed_process_ends_other_ranks() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _one_fails)
    assert caught.value.exceptions[1].error == "KeyError"
    assert caught.value.exceptions[0].error in ("WorkerDied", "TimeoutError")
