"""A weight whose data was assigned is refused before the next forward; one that was written to is trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ithaca.loss.causal import causal_loss
from ithaca.mesh import Mesh, init_mesh
from ithaca.parallelize import parallelize
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64


def sharded() -> tuple[Any, Any, Mesh]:
    mesh = init_mesh(sp=2)
    model: Any = parallelize(small_model("llama"), mesh)
    return model, small_batch(2, 16), mesh


def _assigned(after_a_step: bool) -> None:
    model, batch, mesh = sharded()
    if after_a_step:
        causal_loss(model, batch, mesh).backward()
    weight = model.model.norm.weight
    weight.data = weight.data * 2
    causal_loss(model, batch, mesh)


def _written() -> tuple[float, float, float]:
    model, batch, mesh = sharded()
    weight = model.model.norm.weight
    backup = weight.data.clone()
    losses = [float(causal_loss(model, batch, mesh))]
    for value in (backup * 2, backup):
        with torch.no_grad():
            weight.copy_(value)
        losses.append(float(causal_loss(model, batch, mesh)))
    return losses[0], losses[1], losses[2]


@pytest.mark.parametrize("after_a_step", [False, True], ids=["at once", "after a step"])
def test_weight_with_assigned_data_is_refused(after_a_step: bool) -> None:
    expect_refusal(
        2, _assigned, after_a_step, error="UnsupportedError", match="the data of model.norm.weight was assigned"
    )


def test_weight_written_in_place_is_used() -> None:
    for first, doubled, again in run_ranks(2, _written):
        assert abs(first - doubled) > FP64
        assert abs(first - again) < FP64
