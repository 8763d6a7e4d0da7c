"""The table of known models: counts equal published totals, and a name finds its model or the nearest."""

from __future__ import annotations

import json
import logging
from importlib.resources import files
from typing import Any

import pytest

from ithaca.errors import ConfigError
from ithaca.planning.model.known_models import find_model, known_names, nearest_models, read_config
from ithaca.planning.model.model_sizes import ModelSizes
from tests.planning.models import LLAMA_8B

TABLE: dict[str, Any] = json.loads(files("ithaca.planning.model").joinpath("known_models.json").read_text())


@pytest.mark.parametrize("name", known_names())
def test_known_model_parameters_equal_published(name: str) -> None:
    known = find_model(name)
    assert known is not None
    assert known.name == name
    assert known.sizes.total == TABLE[name]["parameters"]
    assert known.positions
    # A fault in any width is seen in the total.
    config = TABLE[name]["config"]
    wrong = ModelSizes.from_config({**config, "vocab_size": config["vocab_size"] + 64})
    assert wrong.total != TABLE[name]["parameters"]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("unsloth/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("llama-3-8b-instruct", "meta-llama/Meta-Llama-3-8B"),
        ("Llama 3.3 70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.3"),
        ("gemma-3-4b-it", "google/gemma-3-4b-pt"),
        ("olmo-2-7b", "allenai/OLMo-2-1124-7B"),
        ("gpt-oss-120b", "openai/gpt-oss-120b"),
        ("deepseek-v3", "deepseek-ai/DeepSeek-V3"),
    ],
)
def test_find_model_other_spelling_finds_model(said: str, name: str) -> None:
    known = find_model(said)
    assert known is not None
    assert known.name == name


@pytest.mark.parametrize("said", ["qwen", "llama", "mistralai/Mistral-7B-Instruct-v0.2", "deepseek", "", "gpt-oss"])
def test_find_model_half_name_or_other_version_is_none(said: str) -> None:
    assert find_model(said) is None


def test_nearest_models_typo_names_nearest() -> None:
    assert nearest_models("lama-3.1-8b")[0] == "meta-llama/Llama-3.1-8B"
    assert nearest_models("Qwen3-80B")[0] == "Qwen/Qwen3-8B"
    assert nearest_models("zzzz") == []


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": -1},
        {"num_attention_heads": [32]},
        {"intermediate_size": None},
        {"layer_types": ["full_attention"], "sliding_window": 8},
        {"max_position_embeddings": "long"},
        {"hidden_size": None},
    ],
)
def test_read_config_unusable_config_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"x/config\.json"):
        read_config("x/config.json", {**LLAMA_8B, **change})


def test_known_model_gpt_oss_windows_alternate() -> None:
    known = find_model("gpt-oss-20b")
    assert known is not None
    assert [layer.window for layer in known.sizes.layers[:4]] == [128, None, 128, None]


def test_known_config_every_model_builds_without_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from ithaca.models.files.pretrained import known_model

    said: list[str] = []
    for name in ("transformers", *logging.root.manager.loggerDict):
        if name.startswith("transformers"):
            monkeypatch.setattr(logging.getLogger(name), "handle", lambda record: said.append(record.getMessage()))
    for name in known_names():
        assert known_model(name) is not None
        assert not said, name
