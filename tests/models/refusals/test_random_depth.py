"""Stochastic depth and layer dropout are refused before the first layer, on every rank."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ithaca.errors import UnsupportedError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.refusals.random_depth import refuse_dropped_layers
from ithaca.parallelize import parallelize
from ithaca.verify.small_models.features import build, small_batch, small_model
from ithaca.verify.small_models.types import survey_config
from tests.ranks import expect_refusal, run_ranks


def _step(rate: float, later: float | None = None, *, training: bool = True) -> float:
    """Run a step; without the refusal one rank would run a layer that the other dropped, and both would hang."""
    mesh = init_mesh(sp=2)
    model: Any = parallelize(build(survey_config("biogpt", layerdrop=rate)), mesh).train(training)
    if later is not None:
        model.biogpt.layerdrop = later
    torch.manual_seed(mesh.rank)
    with torch.set_grad_enabled(training):
        return float(causal_loss(model, small_batch(1, 8), mesh).detach())


def test_layerdrop_is_refused_by_name() -> None:
    expect_refusal(
        2, _step, 0.5, error="UnsupportedError", match=r"layerdrop=0\.5 drops whole layers.*set layerdrop=0", timeout=60
    )


def test_layerdrop_set_later_is_refused_in_training() -> None:
    expect_refusal(2, _step, 0.0, 0.5, error="UnsupportedError", match=r"biogpt\.layerdrop=0\.5 drops", timeout=60)


def test_layerdrop_in_evaluation_runs() -> None:
    first, second = run_ranks(2, _step, 0.0, 0.5, training=False)
    assert first == second
    assert math.isfinite(first)


@pytest.mark.parametrize(
    ("key", "value"), [("layerdrop", 0.1), ("layer_drop", 0.1), ("drop_path_rate", 0.2), ("stochastic_depth_prob", 1.0)]
)
def test_drop_rate_of_any_module_is_refused(key: str, value: float) -> None:
    model: Any = small_model("llama")
    refuse_dropped_layers(model, measured=True)
    setattr(model.model.layers[1].mlp, key, value)
    with pytest.raises(UnsupportedError, match=rf"model\.layers\.1\.mlp\.{key}={value:g}"):
        refuse_dropped_layers(model, measured=True)


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob


def test_stochastic_depth_module_is_refused() -> None:
    model: Any = small_model("llama")
    model.model.layers[0].path = DropPath(0.0)
    refuse_dropped_layers(model, measured=True)
    model.model.layers[0].path.drop_prob = 0.1
    with pytest.raises(UnsupportedError, match=r"drop_prob=0\.1"):
        refuse_dropped_layers(model, measured=True)


class ByTorch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand([]) < 0.5 else 2 * x


class ByPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self._choose(x)

    def _choose(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else 2 * x


class Jitter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).uniform_(0.9, 1.1)


@pytest.mark.parametrize("kind", [ByTorch, ByPython])
def test_unmeasured_code_that_draws_is_refused(kind: type[nn.Module]) -> None:
    model: Any = small_model("llama")
    model.model.layers[0].extra = kind()
    refuse_dropped_layers(model, measured=True)
    with pytest.raises(UnsupportedError, match=rf"{kind.__name__} draws random numbers in its code"):
        refuse_dropped_layers(model, measured=False)


def test_unmeasured_code_with_noise_on_tokens_is_taken() -> None:
    model: Any = small_model("llama")
    model.model.layers[0].extra = nn.Sequential(Jitter(), nn.Dropout(0.1))
    refuse_dropped_layers(model, measured=False)
