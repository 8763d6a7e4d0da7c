"""A plan's parameters are those of transformers' own modules, for every architecture with an exact verdict."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig

from ithaca.cli.plan_inputs import read_model
from ithaca.errors import ConfigError
from ithaca.models.planner.counted_sizes import counted_sizes
from ithaca.planning.model.architectures import facts_of, verdicts
from ithaca.verify.small_models.types import survey_config

# The text part of emu3 stands in no folder by itself.
EXACT = sorted(kind for kind, row in verdicts().items() if row["verdict"] == "exact" and kind != "emu3_text_model")
# Names that say the sizes, and of the others: several stacks, embeddings of each layer, projections, other names, nested.
QUICK = {"llama", "gpt_bigcode", "hrm_text", "electra", "gemma4_text", "bert", "jetmoe", "dbrx", "moshi", "emu3"}
# transformers cannot build these from its own defaults.
UNBUILT = {"cohere_compass_text", "dbrx", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron"}


def built(kind: str, config: Any) -> nn.Module:
    cls = getattr(transformers, verdicts()[kind]["classes"])
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = cls(config if isinstance(config, cls.config_class) else config.get_text_config())
    return model


def off(kind: str, config: Any, folder: Path) -> float:
    """How far the plan's count is from the modules', of a config as a folder has it."""
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    known = read_model(str(folder))
    assert ("built without weights" in known.cautions.get("sizes", "")) == (not facts_of(kind).counted)
    return known.sizes.total / sum(p.numel() for p in built(kind, config).parameters()) - 1


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in EXACT])
def test_small_models_are_counted_to_a_percent(kind: str, tmp_path: Path) -> None:
    assert abs(off(kind, survey_config(kind), tmp_path)) < 0.01


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in EXACT if k not in UNBUILT]
)
def test_models_of_the_usual_sizes_are_counted_to_a_percent(kind: str, tmp_path: Path) -> None:
    assert abs(off(kind, AutoConfig.for_model(kind), tmp_path)) < 0.01


def test_linear_maps_are_counted_where_adapters_go() -> None:
    config = survey_config("phi")
    sizes = counted_sizes("phi", config.to_dict())
    layers = [m for m in built("phi", config).modules() if type(m).__name__ == "PhiDecoderLayer"]
    linear = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)]
    assert sizes is not None
    assert sizes.with_lora(4).adapters == 4 * sum(m.in_features + m.out_features for m in linear)


def test_a_type_that_transformers_has_not_is_refused_as_in_training(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**survey_config("llama").to_dict(), "model_type": "brand_new"}))
    with pytest.raises(ConfigError, match="'brand_new', which transformers has no causal language model for"):
        read_model(str(tmp_path))


def test_a_config_that_cannot_be_built_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**survey_config("phi").to_dict(), "layer_norm_eps": None}))
    with pytest.raises(ConfigError, match=r"transformers builds no phi of this config .*layer_norm_eps"):
        read_model(str(tmp_path))
