"""Errors of gradients: relative to the gradient or to the floor, a missing gradient as zero, NaN as infinite."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor, nn

from ithaca.verify.parity import Parity, gradient_errors


@pytest.mark.parametrize(
    ("got", "want", "floor", "error"),
    [
        ([4.0, 8.0], [4.0, 10.0], 0.0, 0.2),
        ([4.0, 8.0], [4.0, 10.0], 100.0, 0.02),
        ([4.0, nan], [4.0, 10.0], 1.0, inf),
        (None, [4.0, 10.0], 0.0, 1.0),
        ([4.0, 8.0], None, 1.0, 8.0),
        ([0.0, 0.0], None, 0.0, 0.0),
    ],
)
def test_gradient_errors_one_weight_gives_relative_error(
    got: list[float] | None, want: list[float] | None, floor: float, error: float
) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = None if got is None else torch.tensor([got])
    expected: dict[str, Tensor | None] = {"weight": None if want is None else torch.tensor([want])}
    assert gradient_errors(model, expected, floor=floor) == {"weight": pytest.approx(error)}


def test_gradient_errors_without_gradients_gives_no_error() -> None:
    assert gradient_errors(nn.Linear(2, 1), {}) == {}


def test_worst_gradient_of_none_has_no_name() -> None:
    assert Parity(0.0, 0.0, {}).worst_gradient == ("", 0.0)
    assert Parity(0.0, 0.0, {"a": 1.0, "b": inf}).worst_gradient == ("b", inf)
