"""The embedded model and tokenizers by name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ithaca.errors import DataError
from ithaca.models.files.embedded import BOS, SPECIALS, build_embedded, embedded_config, embedded_tokenizer
from ithaca.models.files.tokenizer import load_tokenizer


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_build_embedded_folder_loads_in_transformers(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    folder = build_embedded(tmp_path / "new" / "embedded")
    assert torch.equal(torch.get_rng_state(), state)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.1e6
    assert model.config.vocab_size == len(tokenizer) == 256 + len(SPECIALS)
    ids = tokenizer("Odysseus", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()
    assert load_tokenizer(str(folder)).chat_template == embedded_tokenizer().chat_template


def test_build_embedded_again_gives_same_bits(tmp_path: Path) -> None:
    first = digest(build_embedded(tmp_path / "a"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        assert digest(build_embedded(tmp_path / "b")) == first
    assert digest(build_embedded(tmp_path / "b")) == first
    (tmp_path / "a" / "model.safetensors").write_bytes(b"trained")
    assert digest(build_embedded(tmp_path / "a"))["model.safetensors"] != first["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_build_embedded_folder_made_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a"

    def beaten(made: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise OSError("not empty")

    monkeypatch.setattr("ithaca.models.files.embedded.os.rename", beaten)
    assert build_embedded(folder) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_embedded_tokenizer_bytes_are_tokens() -> None:
    tokenizer = embedded_tokenizer()
    text = "héllo 😀\r\n\tx  \x00 y " + "".join(map(chr, range(256)))
    ids = tokenizer(text)["input_ids"]
    assert ids == [tokenizer.convert_tokens_to_ids(BOS), *text.encode()]
    assert tokenizer.decode(ids[1:]) == text
    assert embedded_config().pad_token_id == tokenizer.pad_token_id


def test_load_tokenizer_bad_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match=r"no tokenizer came from 'nobody/nothing'.*model\.tokenizer"):
        load_tokenizer("nobody/nothing")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="no tokenizer came from"):
        load_tokenizer(str(tmp_path))
