"""`benchmarks.ulysses`: its calls of the exchange and of the kernels, on the CPU without a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import ulysses


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(call: Callable[[], Any], repeats: int = 1) -> float:
        call()
        return 1.0

    monkeypatch.setattr(ulysses, "DEVICE", "cpu")
    monkeypatch.setattr(ulysses, "gpu_seconds", once)


# Whole kv heads on every rank, and kv heads that two ranks share.
@pytest.mark.parametrize(("heads", "kv", "sp"), [(8, 4, 4), (28, 4, 8)])
def test_pack_shares_run_on_cpu(heads: int, kv: int, sp: int) -> None:
    row = ulysses._pack_shares(32, 2, heads, kv, 16, sp)
    assert row["pack_share"] == row["unpack_share"] == row["unpack_gradients_share"] == 1.0


def test_overhead_runs_on_cpu() -> None:
    assert ulysses.overhead(64)["ratio"] == 1.0
