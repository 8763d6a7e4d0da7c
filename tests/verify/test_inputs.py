"""Refusals of `ithaca verify` before ranks start: what would fail there, or be blamed on sequence parallelism."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ithaca.cli import app
from ithaca.errors import CheckpointError, ConfigError, DataError, IthacaError, MeshError, UnsupportedError
from ithaca.verify.inputs import Material
from ithaca.verify.small_models.features import small_config, small_model
from tests.training.runs import small_run, tiny_model

WEIGHT = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Material]:
    """The material of every launch there would have been."""
    seen: list[Material] = []

    def launch(entry: str, given: tuple[bytes, str, str], **_: Any) -> int:
        seen.append(pickle.loads(given[0]))
        return 0

    monkeypatch.setattr("ithaca.launch.launcher.launch", launch)
    return seen


def typed(*words: str) -> None:
    CliRunner().invoke(app, ["verify", "--device", "cpu", *words], catch_exceptions=False)


def refused(kind: type[IthacaError], said: str, *words: str) -> None:
    with pytest.raises(kind, match=said):
        typed(*words)


def rewritten(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """The model's folder with other weights."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def test_model_folder_whole_is_launched_with_its_weights(tmp_path: Path, launched: list[Material]) -> None:
    typed("--model", str(tiny_model(tmp_path)), "--sp", "3")
    (material,) = launched
    assert "weights of the folder" in material.subject.notes
    assert material.sample.length == 47
    assert not material.scratch.exists(), "gone when the ranks have ended"


def test_weights_file_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    cut_short(tiny_model(tmp_path) / "model.safetensors")
    refused(CheckpointError, r"model\.safetensors cannot be read .*: copy it anew", "--model", str(tmp_path))


def test_weights_file_of_index_missing_is_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {WEIGHT: "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(CheckpointError, r"has no model-00001-of-00001\.safetensors", "--model", str(tmp_path))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_weight_not_finite_is_refused_by_name(tmp_path: Path, number: float) -> None:
    rewritten(tiny_model(tmp_path), lambda tensors: tensors[WEIGHT][3].fill_(number))
    refused(CheckpointError, rf"model\.safetensors: {WEIGHT} holds NaN or infinity", "--model", str(tmp_path))


def test_weight_of_cut_layer_not_finite_is_not_read(tmp_path: Path, launched: list[Material]) -> None:
    tiny_model(tmp_path, num_hidden_layers=3)
    key = WEIGHT.replace("layers.1", "layers.2")
    rewritten(tmp_path, lambda tensors: tensors[key][3].fill_(float("nan")))
    typed("--model", str(tmp_path))
    assert "2 of 3 layers" in launched[0].subject.notes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(WEIGHT), f"misses {WEIGHT}: its weights are not those of its config.json"),
        (lambda tensors: tensors.update({WEIGHT: torch.zeros(40, 32)}), rf"another shape {WEIGHT} \[40, 32\] for \[48, 32\]"),
        (lambda tensors: tensors.update(stray=torch.zeros(2)), "has, unexpectedly, stray"),
    ],
    ids=["missing", "shape", "unexpected"],
)  # fmt: skip
def test_weights_of_another_model_are_refused_as_in_training(
    tmp_path: Path, change: Callable[[Tensors], object], said: str
) -> None:
    rewritten(tiny_model(tmp_path), change)
    refused(CheckpointError, said, "--model", str(tmp_path))


def test_tied_weight_twice_in_files_must_be_equal(tmp_path: Path) -> None:
    tiny_model(tmp_path, tie_word_embeddings=True)
    rewritten(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    typed("--model", str(tmp_path))
    rewritten(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    refused(
        CheckpointError, "are one weight by the config, but the files hold different ones", "--model", str(tmp_path)
    )


def test_weight_of_8_bits_is_refused_by_type(tmp_path: Path) -> None:
    rewritten(tiny_model(tmp_path), lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].to(torch.float8_e4m3fn)}))
    refused(CheckpointError, f"{WEIGHT} as F8_E4M3, which cannot be trained", "--model", str(tmp_path))
    rewritten(tmp_path, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].float().fill_(float("nan"))}))
    refused(CheckpointError, f"{WEIGHT} holds NaN", "--model", str(tmp_path))


@pytest.mark.parametrize("text", ['{"temperature": 0.1, "do_sample": false}', "{"], ids=["refused", "no JSON"])
def test_generation_config_that_cannot_be_saved_is_refused(tmp_path: Path, text: str) -> None:
    (tiny_model(tmp_path) / "generation_config.json").write_text(text)
    refused(
        CheckpointError, r"generation_config\.json: transformers could not save .* delete it", "--model", str(tmp_path)
    )


def test_config_with_missing_attention_package_is_launched(tmp_path: Path, launched: list[Material]) -> None:
    file = tiny_model(tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "_attn_implementation": "flash_attention_2"}))
    typed("--model", str(tmp_path))
    assert launched[0].subject.build() is not None


def test_weight_of_one_expert_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    small_model("mixtral", dtype=torch.float32).save_pretrained(tmp_path)
    typed("--model", str(tmp_path))
    key = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    rewritten(tmp_path, lambda tensors: tensors[key].fill_(float("nan")))
    refused(CheckpointError, f"{key} holds NaN", "--model", str(tmp_path))
    rewritten(tmp_path, lambda tensors: tensors.pop(key))
    refused(CheckpointError, "experts", "--model", str(tmp_path))


def test_folder_without_weights_serves_a_model_and_not_a_run(tmp_path: Path, launched: list[Material]) -> None:
    run = small_run(tmp_path, "unused")
    (tmp_path / "model/model.safetensors").unlink()
    typed("--model", str(tmp_path / "model"))
    assert "random weights" in launched[0].subject.notes
    refused(CheckpointError, r"has no model\.safetensors", written(tmp_path, run))
    # As in training, where a run says that it starts from random ones.
    typed(written(tmp_path, run), "model.weights=random")
    assert launched[1].subject.folder is None


def test_run_from_random_weights_ignores_folder_weights(tmp_path: Path, launched: list[Material]) -> None:
    typed(written(tmp_path, small_run(tmp_path, "unused")), "model.weights=random")
    assert "random weights" in launched[0].subject.notes


def written(folder: Path, run: Any) -> str:
    (folder / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
    return str(folder / "run.yaml")


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["--model", "lama"], ConfigError, "did you mean llama"),
        (["--model", "mamba"], UnsupportedError, "the architecture 'mamba' is refused"),
        (["--model", "./nowhere"], ConfigError, "--model './nowhere': no such folder here"),
        (["--model", "llama", "mesh.sp=4"], ConfigError, "--model llama is a config alone, .* leave the run file"),
        (["--model", "llama", "--layers", "9"], ConfigError, "this model has 2 layers of 1 kind"),
        (["--model", "llama", "--sp", "9"], MeshError, "8 heads over sp=9: every rank needs a head, use sp=8 or less"),
        (["model.kernel=nosuch"], UnsupportedError, "no attention kernel is called 'nosuch'"),
        (["data.sources=nowhere"], DataError, "nowhere"),
        (["model.tokenizer=./nowhere"], DataError, "no tokenizer came from"),
        (["lora.targets=[nosuch]"], ConfigError, "lora.targets"),
    ],
)
def test_bad_input_is_refused_before_ranks_start(words: list[str], kind: type[IthacaError], said: str) -> None:
    refused(kind, said, *words)


def test_model_of_one_head_is_refused_without_another_degree(tmp_path: Path) -> None:
    tiny_model(tmp_path, num_attention_heads=1, num_key_value_heads=1)
    refused(UnsupportedError, "this model has one attention head", "--model", str(tmp_path))


def test_length_beyond_learned_positions_is_refused(tmp_path: Path, launched: list[Material]) -> None:
    small_config("gpt2", n_embd=32, n_head=4, attn_pdrop=0.0, max_position_embeddings=32).save_pretrained(tmp_path)
    refused(
        ConfigError, "gpt2 has learned positions up to 32; .* at most 32", "--model", str(tmp_path), "--length", "33"
    )
    typed("--model", str(tmp_path))
    assert launched[0].sample.length == 32


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        ({"hidden_size": 33}, CheckpointError, r"config\.json: hidden_size: got 33 over 4 heads.*: mend it"),
        ({"hidden_size": "big"}, CheckpointError, r"config\.json: hidden_size: got 'big'.*: mend it"),
        ({"hidden_act": "nosuch"}, CheckpointError, r"config\.json: hidden_act: got 'nosuch'.*: mend it"),
        # Values that only transformers knows to be wrong.
        ({"mlp_bias": [], "sep_token_id": {}, "attention_bias": 5}, CheckpointError, "attention_bias|mlp_bias"),
        (
            {"pretraining_tp": "x"},
            CheckpointError,
            r"config\.json is no config of a llama \(.*pretraining_tp.*\): mend it",
        ),
    ],
)
def test_config_that_builds_no_model_is_refused_by_value(
    tmp_path: Path, more: dict[str, Any], kind: type[IthacaError], said: str
) -> None:
    file = tiny_model(tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    refused(kind, said, "--model", str(tmp_path))


def test_report_of_earlier_command_is_removed_at_launch(tmp_path: Path, launched: list[Material]) -> None:
    (tmp_path / "out.json").write_text('{"cpu": {"ok": true}}')
    refused(ConfigError, "lama", "--model", "lama", "--json", str(tmp_path / "out.json"))
    assert (tmp_path / "out.json").exists(), "a command that is refused touches nothing"
    typed("--model", "llama", "--json", str(tmp_path / "out.json"))
    assert not (tmp_path / "out.json").exists()


def test_attention_dropout_is_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path, attention_dropout=0.1)
    refused(UnsupportedError, "attention dropout is not exact over ranks", "--model", str(tmp_path))


def test_model_config_value_beside_model_is_applied(tmp_path: Path, launched: list[Material]) -> None:
    tiny_model(tmp_path, attention_dropout=0.1)
    typed("--model", str(tmp_path), "model.config.attention_dropout=0")
    assert launched[0].subject.config.attention_dropout == 0.0
    refused(
        ConfigError, "did you mean 'attention_dropout'", "--model", str(tmp_path), "model.config.atention_dropout=0"
    )


def test_token_beyond_vocabulary_is_refused(tmp_path: Path) -> None:
    run = small_run(tmp_path, "unused")
    tiny_model(tmp_path / "model", vocab_size=100)
    refused(DataError, "this model's vocabulary is 0 to 99: set model.tokenizer", written(tmp_path, run))


def test_run_with_lora_is_launched_with_adapters(tmp_path: Path, launched: list[Material]) -> None:
    run = small_run(tmp_path, "unused", lora={"rank": 3, "dropout": 0.5, "targets": ["q_proj", "down_proj"]})
    typed(written(tmp_path, run))
    subject = launched[0].subject
    assert "LoRA of rank 3 on q_proj, down_proj, B drawn, all else frozen" in subject.notes
    assert "lora.dropout 0 for 0.5" in subject.notes


def test_ctrl_c_before_ranks_start_ends_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ithaca.verify.inputs.gather", stop)
    done = CliRunner().invoke(app, ["verify", "--device", "cpu", "--model", "llama"])
    assert done.exit_code == 130
    assert done.output.startswith("ithaca: verify was stopped before its end")


def test_ctrl_c_to_ranks_ends_with_130_and_names_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ithaca.launch.launcher.launch", lambda *_, saves, **__: 0 if saves else 130)
    done = CliRunner().invoke(app, ["verify", "--device", "cpu", "--model", "llama"])
    assert done.exit_code == 130
    assert done.output.startswith("ithaca: verify was stopped before its end")
