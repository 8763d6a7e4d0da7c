"""Token-wise modules, modules that only look token-wise, and norms with a second reader."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ithaca.models.discover.dependence import is_tokenwise
from ithaca.models.discover.roles import find_units

SIZE = 8


class Of(nn.Module):
    """A module of one function, with a matrix or with a vector of weights."""

    def __init__(
        self, function: Callable[[nn.Module, Tensor], Any], *, matrix: bool = True, scale: float = 1.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(scale * torch.randn(*((SIZE, SIZE) if matrix else (SIZE,)), dtype=torch.float64))
        self.function, self.calls = function, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.function(self, x)


def shifted(x: Tensor, by: int) -> Tensor:
    return torch.stack([row.roll(by, 0) * (torch.arange(len(row)) >= by)[:, None] for row in x])


def routed(self: Any, x: Tensor) -> Any:
    """Two experts; the router returns its logits with flattened tokens."""
    logits = (x @ self.weight)[..., :2]
    out = torch.where(logits.argmax(-1, keepdim=True) == 0, x @ self.weight, x.tanh())
    return out, logits.flatten(0, 1)


ALONE: dict[str, Callable[[Any, Tensor], Any]] = {
    "a product": lambda self, x: x @ self.weight,
    "an mlp": lambda self, x: torch.nn.functional.silu(x @ self.weight) @ self.weight.t(),
    "a norm in fp32": lambda self, x: (x.float() * x.float().pow(2).mean(-1, keepdim=True).rsqrt()).to(x) @ self.weight,
    "experts": routed,
}
TOGETHER: dict[str, Callable[[Any, Tensor], Any]] = {
    "a causal convolution": lambda self, x: (x + 0.5 * shifted(x, 1)) @ self.weight,
    "one of small weights": lambda self, x: x @ self.weight + 1e-9 * shifted(x, 1),
    "one whose weights are still zero": lambda self, x: x @ self.weight + 0.0 * shifted(x, 2),
    "a token shift": lambda self, x: 0.9 * x + 0.1 * shifted(x, 1),
    "a state": lambda self, x: (x @ self.weight).cumsum(1),
    "a state from behind": lambda self, x: (x @ self.weight).flip(1).cumsum(1).flip(1),
    "a mean over rows": lambda self, x: x @ self.weight - x.mean(0, keepdim=True),
    "one scale for all": lambda self, x: (x / x.abs().max()) @ self.weight,
    "the place of the largest": lambda self, x: x @ self.weight + x[..., 0].argmax(1)[:, None, None] * 1e-3,
    "the place in the row": lambda self, x: x @ self.weight + 1e-4 * torch.arange(x.shape[1])[:, None],
    "the length": lambda self, x: x @ self.weight / x.shape[1],
    "a count of calls": lambda self, x: x @ self.weight * self.calls,
    "a write to its input": lambda self, x: x.mul_(2) @ self.weight,
    "a sum over tokens beside it": lambda self, x: (x @ self.weight, x.sum(1)),
}


@pytest.mark.parametrize("what", ALONE)
def test_is_tokenwise_module_of_single_tokens_is_true(what: str) -> None:
    assert is_tokenwise(Of(ALONE[what]), torch.zeros(1, 4, SIZE, dtype=torch.float64))


@pytest.mark.parametrize("what", TOGETHER)
def test_is_tokenwise_module_reading_other_tokens_is_false(what: str) -> None:
    assert not is_tokenwise(Of(TOGETHER[what]), torch.zeros(1, 4, SIZE, dtype=torch.float64))


class Layer(nn.Module):
    """A norm, an MLP and a norm, wired by `run`; the norms' weights are neutral."""

    def __init__(self, run: Callable[[Any, Tensor, dict[str, Any]], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.norm, self.after = (nn.RMSNorm(SIZE, dtype=torch.float64) for _ in range(2))
        self.mlp = Of(ALONE["an mlp"])
        self.conv = Of(TOGETHER["a causal convolution"])
        self.kept: Any = None

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        return self.run(self, x, shared)


def stored(self: Any, x: Tensor, shared: dict[str, Any]) -> Tensor:
    shared["normed"] = normed = self.norm(x)
    return x + self.mlp(normed)


def kept(self: Any, x: Tensor, shared: dict[str, Any]) -> Tensor:
    self.kept = normed = self.norm(x)
    return x + self.mlp(normed)


def residual(self: Any, x: Tensor, shared: dict[str, Any]) -> Tensor:
    normed = self.norm(x)
    return normed + self.mlp(normed)


def residual_of_zero(self: Any, x: Tensor, shared: dict[str, Any]) -> Tensor:
    normed = self.norm(x)
    return x + 0.0 * normed + self.mlp(normed)


def scaled_in_place(self: Any, x: Tensor, shared: dict[str, Any]) -> Tensor:
    normed = self.norm(x)
    normed *= 2
    return x + self.mlp(normed)


def input_written(self: Any, x: Tensor, shared: dict[str, Any]) -> Tensor:
    x = x.clone()
    normed = self.norm(x)
    x *= 2
    return x + self.mlp(normed)


def both_values(self: Any, x: Tensor, shared: dict[str, Any]) -> Tensor:
    out = self.mlp(x)
    return x + out + self.after(out)


def usual(self: Any, x: Tensor, shared: dict[str, Any]) -> Tensor:
    return x + self.after(self.mlp(self.norm(x)))


def mixed(self: Any, x: Tensor, shared: dict[str, Any]) -> Tensor:
    return x + self.conv(self.norm(x))


def units_of(run: Callable[..., Tensor]) -> list[tuple[str, ...]]:
    layer = Layer(run)
    x = torch.randn(1, 4, SIZE, dtype=torch.float64)
    return [unit.names for unit in find_units(layer, (x, {}), {}) if unit.wide]


@pytest.mark.parametrize(
    "run", [stored, kept, residual, residual_of_zero, scaled_in_place, input_written], ids=lambda run: run.__name__
)
def test_find_units_norm_with_second_reader_stays_separate(run: Callable[..., Tensor]) -> None:
    assert units_of(run) == [("mlp",)]


def test_find_units_mlp_read_before_its_norm_stays_separate() -> None:
    assert units_of(both_values) == [("mlp",)]


def test_find_units_norms_of_mlp_alone_join_its_unit() -> None:
    assert units_of(usual) == [("norm", "mlp", "after")]


def test_find_units_convolution_over_tokens_is_no_unit() -> None:
    assert units_of(mixed) == []


class Scaled(nn.Module):
    """MLP that scales the output of its last matrix in place."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64) for _ in range(2))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        if self.factor != 1:
            out *= self.factor
        return out


@pytest.mark.parametrize(("factor", "end"), [(1.0, "down"), (1.001, None)])
def test_find_units_product_written_in_place_is_no_end(factor: float, end: str | None) -> None:
    layer = Layer(lambda self, x, shared: x + self.mlp(x))
    layer.mlp = Scaled(factor)  # type: ignore[assignment]
    [unit] = [u for u in find_units(layer, (torch.randn(1, 4, SIZE, dtype=torch.float64), {}), {}) if u.wide]
    assert unit.end == end


def test_find_units_afterwards_leaves_no_hooks_or_tensors() -> None:
    layer = Layer(usual)
    x = torch.randn(1, 4, SIZE, dtype=torch.float64)
    ref = weakref.ref(x)
    find_units(layer, (x, {}), {})
    assert not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    del x
    assert ref() is None
