"""The user's model cut small: every kind of layer stays, widths stay, windows matter, notes list what was cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ithaca.errors import ConfigError, UnsupportedError
from ithaca.verify.inputs import config_of_model
from ithaca.verify.small_models.features import small_config, small_model
from ithaca.verify.small_subject import SMALL_VOCABULARY, Subject, cut_layers, make_subject

MEMORY = 20 * 2**30


def subject(
    kind: str, *, layers: int | None = None, folder: Path | None = None, memory: int = MEMORY, **more: Any
) -> Subject:
    config = more.pop("config", None) or small_config(kind, **more)
    return make_subject(config, length=47, ranks=2, memory=memory, layers=layers, folder=folder)


@pytest.mark.parametrize(
    ("kind", "layers", "kept"),
    [
        ("llama", {"num_hidden_layers": 9}, [0, 1]),
        ("gemma3_text", {"num_hidden_layers": 12, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2}, [0, 5]),
        ("deepseek_v3", {"num_hidden_layers": 8, "first_k_dense_replace": 3}, ["dense", "experts"]),
        ("qwen3_moe", {"num_hidden_layers": 6, "decoder_sparse_step": 2}, ["dense", "experts"]),
        ("smollm3", {"num_hidden_layers": 8, "no_rope_layers": [1, 1, 1, 0] * 2}, ["rope", "none"]),
    ],
)  # fmt: skip
def test_cut_layers_keeps_every_kind(kind: str, layers: dict[str, Any], kept: list[Any]) -> None:
    config = small_config(kind, **layers)
    cut, _, notes = cut_layers(config)
    assert cut.num_hidden_layers == len(kept)
    assert notes == [f"{len(kept)} of {config.num_hidden_layers} layers"]
    if kind == "gemma3_text":
        assert cut.layer_types == ["sliding_attention", "full_attention"]
    if kept == ["dense", "experts"]:
        parts = [type(layer.mlp).__name__ for layer in _empty(cut).model.layers]
        assert len(set(parts)) == 2
    if kind == "smollm3":
        assert sorted(cut.no_rope_layers) == [0, 1]


def _empty(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_make_subject_large_model_keeps_widths() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = AutoConfig.for_model(
        "qwen3", **sizes, head_dim=128, num_hidden_layers=36, vocab_size=151_936, eos_token_id=151_645
    )
    made = subject("", config=config)
    assert {key: getattr(made.config, key) for key in sizes} == sizes
    assert (made.config.num_hidden_layers, made.config.vocab_size) == (1, SMALL_VOCABULARY)
    assert made.dtype == torch.float32
    assert made.notes[:2] == ("1 of 36 layers", "4,096 of 151,936 tokens of vocabulary")
    assert config.num_hidden_layers == 36, "the user's config is left alone"
    with pytest.raises(UnsupportedError, match=r"need about .* GiB to be verified and 1\.0 GiB are free"):
        subject("", config=config, memory=2**30)


def test_make_subject_shortens_windows_and_drops_dropout() -> None:
    made = subject("mistral", sliding_window=4096)
    assert made.config.sliding_window == 15
    assert "window 15 for 4096" in made.notes


def test_make_subject_first_layers_kept_uses_folder_weights(tmp_path: Path) -> None:
    whole = small_model("llama", num_hidden_layers=4, dtype=torch.float32)
    whole.save_pretrained(tmp_path)
    made = subject("llama", config=AutoConfig.from_pretrained(tmp_path), folder=tmp_path)
    assert "weights of the folder" in made.notes
    built = made.build()
    assert built.config.num_hidden_layers == 2
    weight = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(built.state_dict()[weight], whole.state_dict()[weight].double())


def test_cut_layers_too_few_is_refused() -> None:
    with pytest.raises(ConfigError, match="--layers 1: this model has 2 layers of 2 kinds"):
        subject("gemma2", layers=1)


def test_config_of_model_known_name_needs_no_network(tmp_path: Path) -> None:
    for name in ("Qwen/Qwen3-8B", "qwen3-8b"):
        config, folder = config_of_model(name)
        assert (config.model_type, config.hidden_size, config.num_hidden_layers, folder) == ("qwen3", 4096, 36, None)
    # A folder of that name and an architecture come first.
    small_model("llama").save_pretrained(tmp_path / "own")
    assert config_of_model(str(tmp_path / "own"))[1] == tmp_path / "own"
    assert config_of_model("qwen3")[0].hidden_size < 4096
    with pytest.raises(ConfigError, match=r"did you mean .*Qwen/Qwen3-8B"):
        config_of_model("qwen3-8bb")


def test_cut_layers_no_language_model_is_refused_by_name() -> None:
    from transformers import Gemma3Config

    with pytest.raises(UnsupportedError, match="gemma3: no causal language model of it can be built"):
        cut_layers(Gemma3Config(text_config={"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4}))
