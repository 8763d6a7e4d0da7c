"""Outputs and gradients of a unit whose tokens are one tile, or several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ithaca.memory.tiles import Unit


@pytest.mark.parametrize(("tile", "copied"), [(8, False), (4, True)])
def test_unit_of_one_tile_returns_gradient_uncopied(tile: int, copied: bool) -> None:
    """A second tensor of that size beside it would be one residual stream more at a layer's peak."""
    made: list[Tensor] = []

    def gradients(x_BtC: Tensor, dout_BtC: Tensor) -> list[Tensor | None]:
        made.append(3 * dout_BtC)
        return [made[-1]]

    unit = Unit(lambda x_BtC: 3 * x_BtC, list, tile=tile, gradients=gradients)
    x_BLC = torch.randn(1, 8, 2, requires_grad=True)
    (dx_BLC,) = torch.autograd.grad(unit(x_BLC).sum(), x_BLC)
    assert torch.equal(dx_BLC, torch.full((1, 8, 2), 3.0))
    assert (dx_BLC.data_ptr() != made[0].data_ptr()) == copied


@pytest.mark.parametrize("tile", [8, 4])
def test_unit_frozen_input_gets_no_gradient(tile: int) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    unit = Unit(lambda x_BtC: x_BtC * weight, lambda: [weight], tile=tile)
    x_BLC = torch.arange(16.0).view(1, 8, 2)
    unit(x_BLC).sum().backward()
    assert x_BLC.grad is None
    assert weight.grad is not None
    assert torch.equal(weight.grad, x_BLC.sum((0, 1)))


@pytest.mark.parametrize(("then", "now"), [(8, 3), (3, 8)])
def test_unit_changed_tile_draws_forwards_numbers(then: int, now: int) -> None:
    def noise(x_BtC: Tensor) -> Tensor:
        return x_BtC * torch.rand(1)

    unit = Unit(noise, list, tile=then, draws=True)
    x_BLC = torch.ones(1, 8, 2, requires_grad=True)
    out_BLC = unit(x_BLC)
    unit.tile = now
    (dx_BLC,) = torch.autograd.grad(out_BLC.sum(), x_BLC)
    assert torch.equal(dx_BLC, out_BLC)
