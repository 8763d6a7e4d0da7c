"""On a GPU: the step that clips for nothing is torch's AdamW, weights, moments and counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ithaca.state.optimizer.clipping import clipped_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")

SHAPES = [(300, 1000), (1000,), (70_001,), (5, 3, 7)]
# Of a number's own last digit: two orders of the same few products.
LAST_DIGITS = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


def made(dtype: torch.dtype, wide: bool = False) -> tuple[list[Tensor], torch.optim.AdamW]:
    """Weights and their optimizer; `wide`: the same numbers in fp64, and torch's plain AdamW."""
    torch.manual_seed(0)
    drawn = [torch.randn(shape, device="cuda", dtype=dtype) for shape in SHAPES]
    weights = [(weight.double() if wide else weight).requires_grad_() for weight in drawn]
    groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]
    return weights, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), fused=not wide)


def by_torch(optimizer: torch.optim.AdamW, norm: Tensor, loss: Tensor, clip: float) -> None:
    if bool(torch.isfinite(norm) & torch.isfinite(loss)):
        torch._foreach_div_([p.grad for g in optimizer.param_groups for p in g["params"]], max(1.0, float(norm) / clip))
        optimizer.step()


def trained(dtype: torch.dtype, step: Callable[..., None], losses: list[float], wide: bool = False) -> list[Tensor]:
    weights, optimizer = made(dtype, wide)
    for number, loss in enumerate(losses):
        torch.manual_seed(number + 1)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, device="cuda", dtype=dtype).to(weight.dtype)
        norm = torch.tensor(0.5 + number, device="cuda")
        step(optimizer, norm, torch.tensor(loss, device="cuda"), 1.0)
    state = [optimizer.state[weight] for weight in weights]
    return [
        t.detach() for w, s in zip(weights, state, strict=True) for t in (w, s["exp_avg"], s["exp_avg_sq"], s["step"])
    ]


@pytest.mark.parametrize("dtype", LAST_DIGITS)
def test_a_step_is_torchs(dtype: torch.dtype) -> None:
    """In fp32 against torch's own in fp64; in bf16, where every step rounds, against its fused one."""
    losses = [1.0, 2.0, float("nan"), 3.0, 1.0]
    expected = trained(dtype, by_torch, losses, wide=dtype is torch.float32)
    for mine, theirs in zip(trained(dtype, clipped_step, losses), expected, strict=True):
        error = float((mine.double() - theirs.double()).abs().max())
        assert error <= LAST_DIGITS[dtype] * float(theirs.double().abs().max())


def test_a_step_not_taken_changes_no_bit() -> None:
    before, after = (
        trained(torch.float32, clipped_step, [1.0]),
        trained(torch.float32, clipped_step, [1.0, float("inf")]),
    )
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_gradients_are_not_written() -> None:
    """That is what the kernel is for; torch's own would write them."""
    weights, optimizer = made(torch.float32)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    clipped_step(optimizer, torch.tensor(10.0, device="cuda"), torch.tensor(1.0, device="cuda"), 1.0)
    assert all(bool((weight.grad == 1).all()) for weight in weights if weight.grad is not None)


def test_what_lies_otherwise_is_left_to_torch() -> None:
    weight = torch.ones(1000, 300, device="cuda").t().requires_grad_()
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    clipped_step(optimizer, torch.tensor(10.0, device="cuda"), torch.tensor(1.0, device="cuda"), 1.0)
    assert float(weight.grad.max()) < 1, "torch's writes divided gradients back"
