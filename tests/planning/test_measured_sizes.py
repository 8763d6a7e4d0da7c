"""Sizes for `memory="auto"`, of a model at hand: every architecture that is exact can be planned for."""

from __future__ import annotations

import warnings

import pytest

from ithaca.models.auto import sizes_of
from ithaca.models.support import verdicts
from ithaca.planning.choose import choose_plan
from ithaca.planning.plan import Job
from ithaca.proof.small import LISTED, build, small_model
from ithaca.proof.small_more import survey_config
from ithaca.proof.survey_static import kinds

# A type that is newer than the survey has no verdict yet.
EXACT = [kind for kind in kinds() if verdicts().get(kind, {}).get("memory") == "exact"]


@pytest.mark.parametrize(
    "kind", [kind if kind in LISTED else pytest.param(kind, marks=pytest.mark.slow) for kind in EXACT]
)
def test_every_architecture_can_be_planned_for(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(survey_config(kind))
    sizes = sizes_of(model, model)
    assert sizes.total == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)
    assert choose_plan(sizes, Job(64, sp=2), 10**9).layers == ("keep",) * len(sizes.layers)


def test_frozen_weights_have_no_gradients() -> None:
    model = small_model("llama")
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    sizes = sizes_of(model, model)
    assert sizes.trainable == model.model.norm.weight.numel()
