"""The origin of a run: another config, or other weights below adapters, are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ithaca.errors import CheckpointError
from ithaca.models.files.model_origin import check_base, check_origin, digest_weights, read_origin


def save(folder: Path, *, seed: int = 0, shards: str = "50GB", **more: Any) -> Path:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **more
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shards)
    return folder


def test_digest_is_independent_of_files(tmp_path: Path) -> None:
    one = save(tmp_path / "one")
    many = save(tmp_path / "many", shards="5KB")
    assert len(list(many.glob("*.safetensors"))) > 1
    assert digest_weights(one) == digest_weights(many)
    assert digest_weights(save(tmp_path / "other", seed=1)) != digest_weights(one)


def test_digest_changes_with_every_weight(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    before = digest_weights(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.mul_(1.01)
        model.save_pretrained(folder)
        assert digest_weights(folder) != before, name
        with torch.no_grad():
            parameter.div_(1.01)


def test_resume_with_another_config_is_refused_by_setting(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    saved = read_origin(folder, weights=False)
    check_origin(saved, read_origin(folder, weights=False), folder)
    check_origin(None, saved, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"transformers_version": "9.9", "dtype": "bfloat16"}))
    check_origin(saved, read_origin(folder, weights=False), folder)
    (folder / "config.json").write_text(json.dumps(content | {"rms_norm_eps": 1e-3}))
    with pytest.raises(CheckpointError, match=r"rms_norm_eps was 1e-06, is 0\.001.*put its config.json back"):
        check_origin(saved, read_origin(folder, weights=False), folder)


def test_resume_adapters_on_other_weights_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    saved = read_origin(folder, weights=True)
    check_base(saved, folder)
    check_base(None, folder)
    save(folder, seed=1)
    with pytest.raises(CheckpointError, match="other weights than those that the adapter was trained on"):
        check_origin(saved, read_origin(folder, weights=True), folder)
    with pytest.raises(CheckpointError, match="put the model back there"):
        check_base(saved, folder)
    check_base(read_origin(folder, weights=False), folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x10" + b"\0" * 7 + b"not json", b"\x02" + b"\0" * 7 + b"[]"])
def test_digest_of_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = save(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        digest_weights(folder)
