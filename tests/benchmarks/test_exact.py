"""The reference of `benchmarks.exact` against autograd, and that the program sees a fault."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from benchmarks import exact
from benchmarks.floor import SHAPES

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [[0, 5, 36], [3, 20, 33]])
@pytest.mark.parametrize("pairs", [1, 100, 2**28])
def test_blocked_reference_equals_attention(rows: list[int], pairs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(37, 2, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(37, 8, generator=generator) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("shd,td->hst", q, k) * 0.3
    weights = scores.masked_fill(torch.ones(37, 37).triu(1).bool(), float("-inf")).softmax(-1)
    out = torch.einsum("hst,td->shd", weights, v)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    sampled = torch.tensor(rows)
    with patch.object(exact, "PAIRS", pairs):
        got = exact.reference([q.detach(), k.detach(), v.detach(), dout], sampled, 0.3)
    wanted = [out[sampled].transpose(0, 1), dq[sampled].transpose(0, 1), dk[sampled][None], dv[sampled][None]]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_exact_small_lengths_pass_and_planted_fault_fails() -> None:
    found = exact.measure("tiny", 257, 2, CPU)
    assert max(*found["error"].values(), *found["loss_error"].values()) < 1e-5
    attend = exact.planned_attention

    def leaky(*args: object) -> torch.Tensor:
        return attend(*args) * 1.001  # type: ignore[arg-type]

    with patch.object(exact, "planned_attention", leaky):
        assert exact.attention_errors(SHAPES["tiny"], 257, 2, CPU, torch.float32)["error"]["out"] > 5e-4
