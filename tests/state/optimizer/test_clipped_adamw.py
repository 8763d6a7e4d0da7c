"""The step that torch's fused AdamW clips and leaves out by itself, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ithaca.state.optimizer.clipping import clipped_step

SHAPES = [(300, 1000), (1000,), (70_001,), (5, 3, 7)]
# Of the largest number. In fp32 torch's fused AdamW takes 1 - beta in fp32, which plain AdamW takes in fp64; in bf16
# every step rounds, and gradients that are divided beforehand once more.
LAST_DIGITS = {torch.float32: 2e-5, torch.bfloat16: 2**-7}
LOSSES = [1.0, 2.0, float("nan"), 3.0, 1.0]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="runs on a GPU"
))])  # fmt: skip
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def made(device: str, dtype: torch.dtype, wide: bool = False) -> tuple[list[Tensor], torch.optim.AdamW]:
    """Weights and their optimizer; `wide`: the same numbers in fp64, and torch's plain AdamW."""
    torch.manual_seed(0)
    drawn = [torch.randn(shape).to(device, dtype) for shape in SHAPES]
    weights = [(weight.double() if wide else weight).requires_grad_() for weight in drawn]
    groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]
    return weights, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), fused=not wide)


def by_hand(optimizer: torch.optim.AdamW, norm: Tensor, loss: Tensor, clip: float) -> None:
    """Return the step as the host would decide it."""
    if bool(torch.isfinite(norm) & torch.isfinite(loss)):
        torch._foreach_div_([p.grad for g in optimizer.param_groups for p in g["params"]], max(1.0, float(norm) / clip))
        optimizer.step()


def trained(
    device: str, dtype: torch.dtype, step: Callable[..., None], losses: list[float], wide: bool = False
) -> list[Tensor]:
    """Weights, moments and counts of steps after a step for each loss; of the first steps only the first is not clipped."""
    weights, optimizer = made(device, dtype, wide)
    for number, loss in enumerate(losses):
        torch.manual_seed(number + 1)
        for weight in weights:
            weight.grad = torch.randn(weight.shape).to(device, dtype).to(weight.dtype)
        step(optimizer, torch.tensor(0.5 + number, device=device), torch.tensor(loss, device=device), 1.0)
    state = [optimizer.state[weight] for weight in weights]
    return [
        t.detach() for w, s in zip(weights, state, strict=True) for t in (w, s["exp_avg"], s["exp_avg_sq"], s["step"])
    ]


@pytest.mark.parametrize("dtype", LAST_DIGITS)
def test_clipped_steps_equal_plain_adamw(device: str, dtype: torch.dtype) -> None:
    """Compare fp32 with torch's plain AdamW in fp64, and bf16, where every step rounds, with torch's fused AdamW."""
    expected = trained(device, dtype, by_hand, LOSSES, wide=dtype is torch.float32)
    for mine, theirs in zip(trained(device, dtype, clipped_step, LOSSES), expected, strict=True):
        error = float((mine.double() - theirs.double()).abs().max())
        assert error <= LAST_DIGITS[dtype] * float(theirs.double().abs().max())


def test_clipping_factor_left_out_is_detected(device: str) -> None:
    def unclipped(optimizer: torch.optim.AdamW, norm: Tensor, loss: Tensor, clip: float) -> None:
        clipped_step(optimizer, norm, loss, 0.0)

    expected = trained(device, torch.float32, by_hand, LOSSES, wide=True)
    got = trained(device, torch.float32, unclipped, LOSSES)
    errors = [
        float((mine.double() - theirs.double()).abs().max()) / float(theirs.double().abs().max())
        for mine, theirs in zip(got, expected, strict=True)
    ]
    assert max(errors) > 100 * LAST_DIGITS[torch.float32]


def test_skipped_step_changes_no_bit(device: str) -> None:
    before = trained(device, torch.float32, clipped_step, [1.0])
    after = trained(device, torch.float32, clipped_step, [1.0, float("inf")])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
def test_clipped_step_does_not_wait_for_device() -> None:
    weights, optimizer = made("cuda", torch.float32)
    norms = [torch.tensor(norm, device="cuda") for norm in (0.5, 10.0, float("nan"))]
    loss = torch.tensor(1.0, device="cuda")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    clipped_step(optimizer, norms[0], loss, 1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for norm in norms:
            clipped_step(optimizer, norm, loss, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
