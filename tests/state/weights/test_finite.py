"""Weights and configs from which nothing can be trained: refused when they are read, by name and on all ranks alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ithaca.errors import CheckpointError
from ithaca.mesh import init_mesh
from ithaca.models.files.pretrained import empty_model, read_config
from ithaca.models.files.read_weights import load_weights
from ithaca.models.refusals.config_numbers import check_computed
from ithaca.parallelize import parallelize
from ithaca.verify.small_models.features import small_model
from tests.ranks import expect_refusal, run_ranks

BAD = {"nan": float("nan"), "inf": float("inf"), "minus inf": float("-inf")}
PLACES = ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]


def folder_of(place: Path, kind: str = "llama", **more: Any) -> Path:
    small_model(kind, dtype=torch.float32, **more).save_pretrained(place)
    return place


def change(folder: Path, key: str, change: Any) -> None:
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    tensors[key] = change(tensors[key])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read(folder: str) -> None:
    model = parallelize(empty_model(folder, dtype=torch.float32), init_mesh(), memory=None, allow_untested=True)
    load_weights(model, folder)


@pytest.mark.parametrize("bad", BAD)
def test_weight_not_finite_is_found_anywhere(tmp_path: Path, bad: str) -> None:
    """Spoil the last row, which one rank reads: both ranks stop with the tensor's name."""
    for at, key in enumerate(PLACES):
        folder = folder_of(tmp_path / str(at))

        def spoil(tensor: Tensor) -> Tensor:
            tensor[-1] = BAD[bad]
            return tensor.bfloat16()

        change(folder, key, spoil)
        expect_refusal(
            2,
            read,
            str(folder),
            error="CheckpointError",
            match=rf"safetensors has NaN or infinite numbers in {key}: copy",
        )


def test_stacked_experts_not_finite_are_found(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "mixtral")
    keys = [key for key in load_file(folder / "model.safetensors") if ".experts." in key]
    change(folder, keys[-1], lambda tensor: tensor.fill_(float("nan")))
    expect_refusal(
        2, read, str(folder), error="CheckpointError", match=r"NaN or infinite numbers in model\.layers\..*experts"
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_weight_dtype_without_gradient_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = folder_of(tmp_path)
    change(folder, PLACES[1], lambda tensor: (10 * tensor).to(dtype))
    expect_refusal(
        2,
        read,
        str(folder),
        error="CheckpointError",
        match=r"holds .*down_proj\.weight as \w+, which cannot be trained: .*BF16",
    )


def test_weight_trainable_dtype_is_read(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        folder = folder_of(tmp_path / str(dtype))
        change(folder, PLACES[1], lambda tensor, dtype=dtype: tensor.to(dtype))
        run_ranks(1, read, str(folder))


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "theta 0": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "rope_theta: got 0"),
    "theta below 0": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}},
        "rope_theta: got -10000",
    ),
    "old theta": ("llama", {"rope_parameters": None, "rope_theta": 0}, "rope_theta: got 0"),
    "factor 0": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}}, "factor"),
    "eps below 0": ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps: got -1e-05"),
    "eps nan": ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: got NaN"),
    "layer norm": ("gpt2", {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon: got -1"),
    "softcap 0": ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping: 0"),
    "scaling 0": ("granite", {"logits_scaling": 0.0}, "logits_scaling: 0"),
    "multiplier nan": ("granite", {"attention_multiplier": float("nan")}, "attention_multiplier: NaN"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_giving_no_finite_numbers_is_refused(tmp_path: Path, name: str) -> None:
    kind, changed, said = CONFIGS[name]
    folder = folder_of(tmp_path, kind)
    read_config(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(CheckpointError, match=said):
        read_config(folder)


def test_computed_buffers_not_finite_are_refused(tmp_path: Path) -> None:
    """Whatever the setting is called by which it came about."""
    config = read_config(folder_of(tmp_path))
    config.rope_parameters["rope_theta"] = 0.0
    with pytest.raises(CheckpointError, match=r"inv_freq with NaN or infinity"):
        empty_model(config, dtype=torch.float32)
    model = small_model("llama")
    check_computed(model)
    model.model.layers[0].self_attn.scaling = float("nan")
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.scaling as nan"):
        check_computed(model)
