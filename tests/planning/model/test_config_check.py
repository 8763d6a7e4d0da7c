"""Checks of a config.json: transformers builds what passes, and fails for what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from ithaca.errors import ConfigError, IthacaError
from ithaca.models.files.pretrained import transformers_words
from ithaca.planning.model.config_check import WORDS, check_config
from ithaca.planning.model.config_words import DTYPES
from ithaca.planning.model.known_models import known_config, known_names
from ithaca.verify.small_models.features import LISTED, small_config
from tests.bad_configs import BAD_VALUES

# What transformers builds all the same: models of nothing, models whose forward pass fails or gives NaN, and what is
# refused for another reason than that it cannot be built.
BUILT = {
    "hidden_size=0", "num_hidden_layers=0", "num_hidden_layers=-1", "intermediate_size=0", "max_position_embeddings=0",
    "max_position_embeddings=-1", "max_position_embeddings=1000000000000000000000000000000", "rope_negative_factor",
    "rope_theta_of_zero", "rope_longrope_with_too_few", "rms_norm_eps=-1", "rms_norm_eps=nan", "initializer_range=-1",
    "attention_dropout=None", "attention_dropout=-0.5", "attention_dropout=2.0", "code_in_the_folder", "quantization",
    "rope_share_above_one", "heads_over_3", "heads_over_7",
}  # fmt: skip


def content(kind: str, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(small_config(kind).to_json_string(use_diff=False))
    return settings | changes


def build(settings: dict[str, Any]) -> None:
    settings = dict(settings)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))


def test_config_words_equal_transformers() -> None:
    """The failure lists the names to add to or remove from `planning/model/config_words.py`."""
    known = transformers_words()
    for name in ("causal", "activations", "ropes", "layers"):
        written, theirs = getattr(WORDS, name), getattr(known, name)
        assert written == theirs, (name, theirs - written, written - theirs)
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES)


@pytest.mark.parametrize("name", BAD_VALUES)
def test_check_config_bad_value_is_refused(name: str) -> None:
    with pytest.raises(IthacaError) as caught:
        check_config(content("llama", **BAD_VALUES[name]))
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 500


@pytest.mark.parametrize("name", [name for name in BAD_VALUES if name not in BUILT and "10000000000" not in name])
def test_transformers_refused_value_fails_too(name: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - transformers and torch raise what they like
        build(content("llama", **BAD_VALUES[name]))


@pytest.mark.parametrize("kind", LISTED)
def test_check_config_passed_config_is_built(kind: str) -> None:
    """Every architecture's own config passes, and a wrong name in it is refused."""
    check_config(content(kind))
    build(content(kind))
    with pytest.raises(ConfigError, match="num_hidden_layers: got 0"):
        check_config(content(kind, num_hidden_layers=0))


def test_check_config_defaults_of_every_type_pass() -> None:
    refused = {}
    for kind in sorted(WORDS.causal):
        try:
            settings = json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False))
        except (ValueError, StrictDataclassError):
            # A type whose parts must be given (an encoder and a decoder) has no default.
            continue
        try:
            check_config(settings)
        except IthacaError as error:
            refused[kind] = str(error)
    assert not refused


@pytest.mark.parametrize("name", known_names())
def test_check_config_known_model_passes(name: str) -> None:
    check_config(known_config(name) or {})


def test_check_config_text_config_is_checked() -> None:
    inside = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanhh"}
    with pytest.raises(ConfigError, match=r"text_config\.hidden_activation: got .* the nearest is 'gelu_pytorch_tanh'"):
        check_config({"model_type": "gemma3", "text_config": inside})


def test_check_config_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from ithaca.planning.model.config_check import check_config; check_config({'model_type': 'llama'}); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
