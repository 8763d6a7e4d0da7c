"""Adapters go where they are trained and merged, and nowhere else: what would be passed by is refused before a step."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from ithaca.config.schema import LoraSettings
from ithaca.errors import CheckpointError, ConfigError, UnsupportedError
from ithaca.models.files.export_checkpoint import export_checkpoint
from ithaca.models.files.pretrained import add_adapters, check_adapters, empty_model
from ithaca.verify.small_models.features import small_model
from tests.ranks import RankError
from tests.training.runs import run_train, small_run

ATTENTION = "[k_proj,o_proj,q_proj,v_proj]"


@pytest.mark.parametrize(
    ("kind", "targets", "named", "instead"),
    [
        ("llama", ["q_proj", "embed_tokens"], r"model\.embed_tokens is no linear layer \(Embedding\)", "[q_proj]"),
        ("llama", ["q_proj", "v_proj", "lm_head"], "lm_head is the head", "[q_proj,v_proj]"),
        ("llama", ["lm_head"], "lm_head is the head", "all-linear"),
        ("mixtral", "all-linear", r"model\.layers\.0\.mlp\.gate is no linear layer \(MixtralTopKRouter\)", ATTENTION),
        ("mixtral", ["q_proj", "w1", "w2", "w3"], r"mlp\.experts is no linear layer \(MixtralExperts\)", "[q_proj]"),
    ],
)
@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")
def test_targets_that_would_be_passed_by_are_refused(kind: str, targets: Any, named: str, instead: str) -> None:
    config: Any = small_model(kind, dtype=torch.float32).config
    with pytest.raises(UnsupportedError, match=named) as raised:
        check_adapters(config, LoraSettings(targets=targets))
    assert str(raised.value).endswith(f"gets no adapter: use lora.targets={instead}")
    with pytest.raises(UnsupportedError, match=named):
        add_adapters(empty_model(config, dtype=torch.float32), LoraSettings(targets=targets), seed=0)
    right = instead if instead == "all-linear" else instead.strip("[]").split(",")
    check_adapters(config, LoraSettings(targets=right))


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_prj"], "no layer of this model is called 'q_prj': did you mean 'q_proj'?"),
        (["q_proj", "v_prj"], "no layer of this model is called 'v_prj': did you mean 'v_proj'?"),
        (["wqkv"], "'wqkv': there are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"),
    ],
)
def test_a_target_that_is_not_there_is_refused_beside_one_that_is(targets: list[str], said: str) -> None:
    config: Any = small_model("llama", dtype=torch.float32).config
    with pytest.raises(ConfigError) as raised:
        check_adapters(config, LoraSettings(targets=targets))
    assert said in str(raised.value)
    # A target may be a path, and one target no list.
    check_adapters(config, LoraSettings(targets=["self_attn.q_proj"]))
    check_adapters(config, LoraSettings.model_validate({"targets": "q_proj"}))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "deepseek_v3"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
def test_every_adapter_of_an_empty_model_has_values(kind: str) -> None:
    config: Any = small_model(kind, dtype=torch.float32).config
    targets: Any = ["q_a_proj", "q_b_proj", "o_proj"] if kind == "deepseek_v3" else "all-linear"
    adapted = add_adapters(empty_model(config, dtype=torch.float32), LoraSettings(rank=2, targets=targets), seed=0)
    layers: list[Any] = [layer for layer in adapted.modules() if isinstance(layer, LoraLayer)]
    assert layers
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 2 * len(layers)
    assert not any(p.is_meta for p in trained)
    for layer in layers:
        assert 0 < float(layer.lora_A["default"].weight.detach().abs().max()) < 10
        assert not layer.lora_B["default"].weight.any()


def test_a_run_with_such_a_target_ends_before_its_first_step(tmp_path: Path) -> None:
    run = small_run(tmp_path, "head", lora={"rank": 2, "targets": ["q_proj", "lm_head"]})
    with pytest.raises(RankError, match=r"lm_head is the head.*use lora\.targets=\[q_proj\]"):
        run_train(1, run)
    assert not list((tmp_path / "head" / "checkpoints").glob("step-*"))


def test_an_adapter_on_a_folder_named_from_elsewhere_is_exported_without_a_warning(tmp_path: Path) -> None:
    """A run started with model.name=model: its adapter says "model", the export finds the whole path."""
    stages = [{"length": 64, "steps": 1, "batch": 2}]
    assert run_train(1, small_run(tmp_path, "run", lora={"rank": 2}, stages=stages))["finished"]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    facts = json.loads((checkpoint / "facts.json").read_text())
    facts["model"]["adapter"]["base_model_name_or_path"] = "model"
    (checkpoint / "facts.json").write_text(json.dumps(facts))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # PEFT's own, since transformers 5.23: the verbs filter it out (cli/process.py).
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        export_checkpoint(checkpoint, tmp_path / "again")
    settings = json.loads((tmp_path / "again" / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str((tmp_path / "model").resolve())


def test_adapters_over_other_weights_are_neither_trained_on_nor_exported(tmp_path: Path) -> None:
    """Somebody has put another model of the same sizes into the folder since."""
    stages = [{"length": 64, "steps": 1, "batch": 2}]
    assert run_train(1, small_run(tmp_path, "run", lora={"rank": 2}, stages=stages))["finished"]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    export_checkpoint(checkpoint, tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight)
    model.save_pretrained(tmp_path / "model")
    longer = small_run(tmp_path, "run", lora={"rank": 2}, stages=[stages[0] | {"steps": 2}])
    with pytest.raises(RankError, match="other weights than those that the adapter was trained on"):
        run_train(1, longer)
    with pytest.raises(CheckpointError, match="other weights than those that the adapter was trained on"):
        export_checkpoint(checkpoint, tmp_path / "again")
