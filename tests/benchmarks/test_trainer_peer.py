"""The peer benchmark's rows, loops and table, and what was measured with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import trainer_loops, trainer_peer
from tests.ranks import ROOT, run_ranks
from tests.tolerances import LOSS, NORM

MEASURED = ROOT / "benchmarks/results/trainer_peer.json"
LENGTH = 48


def losses_of(system: str, clip: float = 0.1) -> dict[str, list[float]]:
    """Four short steps, as the program runs ten long ones; DeepSpeed is no part of the tests' packages."""
    return trainer_loops.part(system, LENGTH, clip, 4)


def test_trainer_rows_are_deterministic_and_partly_learned() -> None:
    first, again, other = (trainer_loops.row(index, LENGTH) for index in (0, 0, 1))
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["input_ids"], other["input_ids"])
    assert int((first["labels"] == -100).sum()) == LENGTH // 3


@pytest.mark.slow
def test_trainer_two_ranks_take_plain_steps() -> None:
    expected = losses_of("plain")
    assert min(expected["norms"]) > 0.1, "clipping must bite for this to mean anything"
    assert len(expected["seconds"]) == 4
    for got in run_ranks(2, losses_of, "ithaca"):
        assert max(abs(a - b) for a, b in zip(got["losses"], expected["losses"], strict=True)) < LOSS
        assert max(abs(a - b) for a, b in zip(got["norms"], expected["norms"], strict=True)) < NORM


def test_trainer_planted_doubled_gradient_is_seen() -> None:
    """Clipping turned off stands for it: the losses part at once."""
    expected, got = losses_of("plain"), losses_of("plain", clip=1e9)
    assert got["losses"][0] == expected["losses"][0]
    assert abs(got["losses"][-1] - expected["losses"][-1]) > 100 * LOSS


def made(errors: dict[str, float], seconds: dict[str, float]) -> dict[str, Any]:
    parity = [
        {
            "system": system,
            "length": length,
            "clip": clip,
            "seed": seed,
            "losses": [4.0, 3.0 + error],
            "norms": [1.0, 1.0],
        }
        for length, clip, seed in trainer_peer.CASES
        for system, error in errors.items()
    ]
    times = {s: {str(n): [spent, spent, 9.0] for n in trainer_peer.LENGTHS} for s, spent in seconds.items()}
    return {"parity": parity, "rounds": [{"load": 0.5} | times]}


def test_trainer_table_has_differences_and_medians() -> None:
    result = made({"plain": 0.0, "ithaca": -2e-6, "fp64": 1e-6}, {"plain": 0.1, "ithaca": 0.15})
    lines = trainer_peer.table(result).splitlines()
    assert lines[2].endswith(
        "| 5.0e-07, 7.1e-07, 1.0e-06 | 0.0e+00, 0.0e+00, 0.0e+00 | 100 ms, 1.00x | 100 ms, 1.00x |"
    )
    assert lines[3].startswith(
        "| ithaca | 1.0e-06, 1.4e-06, 2.0e-06 | 0.0e+00, 0.0e+00, 0.0e+00 | 1.5e-06, 2.1e-06, 3.0e-06 |"
    )
    assert lines[3].endswith("| 150 ms, 1.50x | 150 ms, 1.50x |")
    assert len(lines) == 4


def test_measured_ithaca_is_as_close_as_deepspeed() -> None:
    result = json.loads(MEASURED.read_text())
    for system in ("ithaca", "ithaca-trainer"):
        for what in ("losses", "norms"):
            own, peer = (
                trainer_peer.spread(trainer_peer.differences(result, s, what=what)) for s in (system, "deepspeed")
            )
            assert all(ours <= theirs for ours, theirs in zip(own, peer, strict=True))
        assert max(trainer_peer.differences(result, system)) < LOSS
        for length, allowed in trainer_peer.ALLOWED.items():
            plain = trainer_peer.median_s(result, "plain", length)
            assert trainer_peer.median_s(result, system, length) < allowed * plain
