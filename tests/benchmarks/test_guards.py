"""The benchmark of guards at small sizes on a CPU: its trials run, and a kernel that is wrong beyond a size is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import guards
from ithaca.attention.kernels import KERNELS
from ithaca.attention.kernels.cpu import CpuKernel

CPU = torch.device("cpu")


@pytest.fixture
def kernel() -> CpuKernel:
    return CpuKernel()


@pytest.mark.parametrize("form", ["rows", "row"])
def test_last_tokens_of_a_large_call_equal_a_small_one(kernel: CpuKernel, form: str) -> None:
    row = guards.elements(kernel, form, 16 * 128 * 1024, CPU, tail=64)
    assert row["elements"] >= 16 * 128 * 512
    assert max(row["errors"].values()) < 1e-5


def test_kernel_without_windows_is_compared_by_its_last_head() -> None:
    class Plain(CpuKernel):
        name = "cudnn"

    row = guards.elements(Plain(), "row", 16 * 128 * 512, CPU, tail=64)
    assert max(row["errors"].values()) < 1e-5


def test_kernel_that_is_wrong_in_large_calls_is_seen() -> None:
    class Wraps(CpuKernel):
        def backward(self, dout: Any, qkv: Any, *rest: Any) -> Any:
            dq, dk, dv = super().backward(dout, qkv, *rest)
            return (dq * 0.5 if qkv.q.numel() > 16 * 128 * 512 else dq), dk, dv

    errors = guards.elements(Wraps(), "rows", 16 * 128 * 2048, CPU, tail=64)["errors"]
    assert errors["dq"] > 0.4
    assert errors["dk"] < 1e-5


def test_repeatable_and_sinks_trials_run(kernel: CpuKernel) -> None:
    try:
        row = guards.repeatable(kernel, 1, CPU, length=64)
    finally:
        torch.use_deterministic_algorithms(False)
    assert row["identical"] is True
    assert guards.sinks(kernel, 0, CPU, length=64)["around_forward_ms"] > 0


def test_trials_are_of_each_kernel_and_form() -> None:
    found = guards.wanted(["cudnn", "flash"], [1e9])
    forms = [(each["kernel"], each["given"][0]) for each in found if each["trial"] == "elements"]
    assert forms == [("cudnn", "rows"), ("cudnn", "row"), ("flash", "rows"), ("flash", "row"), ("flash", "documents")]
    assert all(each["kernel"] in KERNELS for each in found)
