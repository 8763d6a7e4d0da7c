"""Parameters of a plan equal those of transformers' modules, for every exact architecture."""

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
    """Return the relative error of the plan's parameter count for a config.json in a folder."""
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    known = read_model(str(folder))
    assert ("built without weights" in known.cautions.get("sizes", "")) == (not facts_of(kind).counted)
    return known.sizes.total / sum(p.numel() for p in built(kind, config).parameters()) - 1


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in EXACT])
def test_counted_sizes_small_model_is_within_a_percent(kind: str, tmp_path: Path) -> None:
    assert abs(off(kind, survey_config(kind), tmp_path)) < 0.01


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in EXACT if k not in UNBUILT]
)
def test_counted_sizes_full_size_model_is_within_a_percent(kind: str, tmp_path: Path) -> None:
    assert abs(off(kind, AutoConfig.for_model(kind), tmp_path)) < 0.01


def test_counted_sizes_linear_edges_equal_adapters() -> None:
    config = survey_config("phi")
    sizes = counted_sizes("phi", config.to_dict())
    layers = [m for m in built("phi", config).modules() if type(m).__name__ == "PhiDecoderLayer"]
    linear = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)]
    assert sizes is not None
    assert sizes.with_lora(4).adapters == 4 * sum(m.in_features + m.out_features for m in linear)


def test_counted_sizes_unknown_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**survey_config("llama").to_dict(), "model_type": "brand_new"}))
    with pytest.raises(ConfigError, match="'brand_new', which transformers has no causal language model for"):
        read_model(str(tmp_path))


def test_counted_sizes_unbuildable_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**survey_config("phi").to_dict(), "layer_norm_eps": None}))
    with pytest.raises(ConfigError, match=r"transformers builds no phi of this config .*layer_norm_eps"):
        read_model(str(tmp_path))
