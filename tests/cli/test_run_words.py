"""The default length of a run that is typed without a run file."""

import json
from pathlib import Path

import pytest

from ithaca.cli.run_words import load_typed_run


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return f"model.name={tmp_path}"


def test_default_stage_model_with_few_positions_takes_their_length(model: str) -> None:
    run = load_typed_run([model, "stages.0.steps=7"])
    assert [(stage.length, stage.steps) for stage in run.stages] == [(1024, 7)]


@pytest.mark.parametrize(
    "words",
    [
        ["stages.0.length=4k"],
        ["stages.0.rope={kind: yarn, factor: 4}"],
        ["model.weights=random"],
        ["model.config.max_position_embeddings=8192"],
    ],
)
def test_default_stage_with_length_rope_or_more_positions_stays(model: str, words: list[str]) -> None:
    assert load_typed_run([model, *words]).stages[0].length == 4096


def test_run_file_without_stages_keeps_default_length(model: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{name: {tmp_path}}}\n")
    assert load_typed_run([str(file)]).stages[0].length == 4096
