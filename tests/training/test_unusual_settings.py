"""Rates and RoPE changes that pretrained weights are not trained on with are said before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ithaca.config.schema import RunSettings, StageSettings, load_run
from ithaca.training.unusual_settings import advise_settings
from ithaca.verify.small_models.features import small_config
from tests.training.runs import run_train, small_run

KNOWN = 8192


def said(*stages: dict[str, Any], adapters: bool = False, theta: float = 500_000.0, **more: Any) -> list[str]:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "max_position_embeddings": KNOWN, **more}
    read = [StageSettings(**{"length": KNOWN, "steps": 5, **stage}) for stage in stages]
    return advise_settings(small_config("llama", **rope), read, adapters=adapters)


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 5e-5, 2e-4])
def test_usual_rates_are_not_spoken_of(rate: float) -> None:
    assert said({"lr": rate}) == []
    assert said({"lr": 10 * rate}, adapters=True) == []


@pytest.mark.parametrize(
    ("rate", "adapters", "usual"), [(3e-3, False, "1.0e-5"), (1e-3, False, "1.0e-5"), (3e-2, True, "1.0e-4")]
)
def test_a_rate_far_above_is_named_with_the_usual_one(rate: float, adapters: bool, usual: str) -> None:
    (line,) = said({}, {"lr": rate}, adapters=adapters)
    assert line.startswith(f"stage 2 has lr {rate:g}, far above")
    assert line.endswith(f"lr: {usual} is usual")


@pytest.mark.parametrize(
    ("length", "rope", "line"),
    [
        (2 * KNOWN, {"kind": "theta", "theta": 10_000}, "a rope theta of 10,000, below the model's own 500,000"),
        (2 * KNOWN, {"kind": "yarn", "factor": 2, "theta": 1000}, "a rope theta of 1,000, below the model's own"),
        (
            KNOWN,
            {"kind": "theta", "theta": 1_000_000},
            "a rope change of kind 'theta' for 8,192 tokens, and the model's",
        ),
        (1024, {"kind": "yarn", "factor": 4}, "a rope change of kind 'yarn' for 1,024 tokens"),
        (
            4 * KNOWN,
            {"kind": "linear", "factor": 64},
            "a rope factor of 64 over 8,192 positions, far more than the 32,768",
        ),
        (2 * KNOWN, {"kind": "theta", "theta": 1e12}, "a rope theta of 1e+12, far more than 16,384 tokens need"),
    ],
)
def test_a_rope_change_without_need_is_named(length: int, rope: dict[str, Any], line: str) -> None:
    (found,) = said({"length": length, "rope": rope})
    assert found.startswith(f"stage 1 has {line}")


@pytest.mark.parametrize(
    "stages",
    [
        [{"length": 4 * KNOWN, "rope": {"kind": "yarn", "factor": 4}}],
        # Stretched once for all lengths to come.
        [{"length": KNOWN, "rope": {"kind": "yarn", "factor": 16}}, {"length": 16 * KNOWN}],
        [{"length": 4 * KNOWN, "rope": {"kind": "theta", "theta": 8_000_000}}],
        [{"length": KNOWN}],
    ],
)
def test_a_rope_change_that_is_needed_is_not_spoken_of(stages: list[dict[str, Any]]) -> None:
    assert said(*stages) == []


def test_a_models_own_scaling_is_counted_from_before_it() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500_000.0, "original_max_position_embeddings": KNOWN}
    own = {"rope_parameters": scaled, "max_position_embeddings": 4 * KNOWN}
    assert said({"length": 8 * KNOWN, "rope": {"kind": "yarn", "factor": 8}}, **own) == []
    (line,) = said({"length": 4 * KNOWN, "rope": {"kind": "yarn", "factor": 4}}, **own)
    assert "positions reach 32,768 as they are: leave rope out" in line


def test_the_embedded_runs_settings_reach_no_other_model(tmp_path: Path) -> None:
    embedded = RunSettings()
    for words in (["model.name=mine"], ["model={name: mine}"], ["seed=3", "model.name=mine"]):
        own = load_run(None, words)
        assert own.model.name == "mine"
        assert [stage.rope for stage in own.stages] == [None]
        assert own.stages[0].lr == 1e-5
        assert own.stages[0].steps not in {stage.steps for stage in embedded.stages}
    # Whatever stands before or after it, and in a file.
    for words in (["stages.0.length=64k", "model.name=mine"], ["model.name=mine", "stages.0.length=64k"]):
        (stage,) = load_run(None, words).stages
        assert (stage.length, stage.lr, stage.rope) == (65_536, 1e-5, None)
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: mine}\n")
    assert load_run(file).stages == load_run(None, ["model.name=mine"]).stages
    assert load_run(None, ["stages.0.length=64k"]).stages[1] == embedded.stages[1]


def test_a_run_warns_before_its_first_step(tmp_path: Path) -> None:
    found = run_train(1, small_run(tmp_path, "run", stages=[{"length": 64, "steps": 1, "batch": 1, "lr": 3e-3}]))
    (line,) = [line for line in found["said"] if "lr 0.003" in line]
    assert line.startswith("warning: stage 1 has lr 0.003, far above what pretrained weights take")
    random = small_run(tmp_path, "random", model={"name": str(tmp_path / "model"), "weights": "random"},
                       stages=[{"length": 64, "steps": 1, "batch": 1, "lr": 3e-3}])  # fmt: skip
    assert not [line for line in run_train(1, random)["said"] if "far above" in line]
