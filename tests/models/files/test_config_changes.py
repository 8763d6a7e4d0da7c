"""Changes of a model's config by a run file: accepted and refused values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from ithaca.errors import ConfigError, UnsupportedError
from ithaca.models.files.pretrained import change_config, read_config
from ithaca.planning.model.config_names import refuse_attention_dropout


def gpt2(**values: Any) -> GPT2Config:
    return GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=32, **values)


def test_model_config_values_replace_those_of_folder(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    assert read_config(tmp_path).attn_pdrop == 0.1
    changed = read_config(tmp_path, {"attn_pdrop": 0, "resid_pdrop": 0.2})
    assert (changed.attn_pdrop, changed.resid_pdrop, changed.embd_pdrop) == (0.0, 0.2, 0.1)
    assert isinstance(changed.attn_pdrop, float)
    assert changed.hidden_size == 16


def test_with_changes_leaves_given_config_unchanged() -> None:
    config = gpt2()
    assert change_config(config, {}) is config
    change_config(config, {"attn_pdrop": 0})
    assert config.attn_pdrop == 0.1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"atn_pdrop": 0}, "model.config: a gpt2 has no 'atn_pdrop': did you mean 'attn_pdrop'?"),
        ({"wobble": 0}, "a gpt2 has no 'wobble': look for its name in the model's config.json"),
        ({"attn_pdrop": "none"}, "model.config.attn_pdrop: got 'none', and the model has 0.1"),
        ({"attn_pdrop": 2}, "model.config: attn_pdrop: got 2.0, and a share from 0 to 1 is needed"),
        ({"n_embd": 32}, "model.config.n_embd would change the model's weights"),
        ({"n_layer": 2}, "model.config.n_layer would change the model's weights"),
        ({"dtype": "bfloat16"}, "model.config.dtype: leave it out: precision=bf16"),
        ({"model_type": "llama"}, "name another model by model.name"),
    ],
)
def test_model_config_bad_value_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        change_config(gpt2(), changes)
    assert said in str(caught.value)


def test_model_config_rope_is_refused_naming_stages() -> None:
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, vocab_size=32
    )
    with pytest.raises(ConfigError, match=r"rope_theta: leave it out: positions are stretched by stages\.0\.rope"):
        change_config(config, {"rope_theta": 1e6})


def test_attention_dropouts_are_refused_naming_all() -> None:
    given = {"attn_pdrop": 0.1, "attention_dropout": 0.2, "attn_dropout": 0.0, "resid_pdrop": 0.1}
    with pytest.raises(UnsupportedError) as caught:
        refuse_attention_dropout(given.get)
    said = str(caught.value)
    assert said.startswith("config.attention_dropout=0.2, config.attn_pdrop=0.1: attention dropout is not exact")
    assert "type model.config.attention_dropout=0 model.config.attn_pdrop=0 beside the run file" in said
    assert said.endswith("from_pretrained(..., attention_dropout=0.0, attn_pdrop=0.0)")
    refuse_attention_dropout({"attn_pdrop": 0.0}.get)
