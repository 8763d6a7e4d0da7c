"""`UlyssesConfig`: what it reads, what it refuses and how it says so, before any rank waits for another."""

from __future__ import annotations

import json
import pickle
import warnings
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from transformers import TrainingArguments

import ithaca
from ithaca.errors import MemoryPlanError, UnsupportedError
from ithaca.integrations import library_versions
from ithaca.integrations.config import UlyssesConfig
from ithaca.integrations.kernel_names import kernel_for
from ithaca.verify.small_models.features import small_batch, small_model
from tests.integrations.runs import reset, train
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import BF16_LOSS, LOGITS


def test_config_is_a_public_name() -> None:
    assert ithaca.UlyssesConfig is UlyssesConfig


def test_sizes_seen_by_accelerate_are_one() -> None:
    config = UlyssesConfig(sp_size=4, ring_size=2)
    sizes = [getattr(config, f"{name}_size") for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")]
    assert sizes == [1] * 5
    assert [config.sp_enabled, config.cp_enabled] == [False, False]
    assert (config.settings.sp_size, config.settings.ring_size) == (4, 2)
    assert repr(config) == "UlyssesConfig(sp_size=4, ring_size=2)"


def test_config_from_deepspeed_recipe_is_read() -> None:
    published = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=4,
        dp_shard_size=2,
        sp_handler=DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="flash_attention_2"
        ),
    )
    config = UlyssesConfig.from_accelerate(published, memory=None)
    assert (config.settings.sp_size, config.settings.dp_size, config.settings.kernel) == (4, 2, "flash")
    assert (config.settings.length, config.settings.memory) == (None, None)


@pytest.mark.parametrize("name", ["tp", "cp"])
def test_other_parallelism_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}_size=2: only .* use sp_size=2"):
        UlyssesConfig.from_accelerate(ParallelismConfig(**{f"{name}_size": 2}))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("sdpa", "auto"), ("eager", "auto"), ("flash_attention_2", "flash"), ("flash_attention_3", "flash_attn_3"),
        ("flash_attention_4", "flash_attn_4"),
        ("flex_attention", "flex"), ("kernels-community/flash-attn2", "flash"), ("cudnn", "cudnn"),
    ],
)  # fmt: skip
def test_attention_name_gives_kernel(name: str, kernel: str) -> None:
    assert kernel_for(name) == kernel
    assert UlyssesConfig(2, sp_handler={"sp_attn_implementation": name}).settings.kernel == kernel
    assert UlyssesConfig(2, kernel="cpu", sp_handler={"sp_attn_implementation": name}).settings.kernel == "cpu"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="'paged' has no kernel here: use one of sdpa"):
        kernel_for("paged")
    with pytest.raises(UnsupportedError, match="sp_handler has 'seq'"):
        UlyssesConfig(2, sp_handler={"seq": 1})
    with pytest.raises(UnsupportedError, match="sp_handler is 4: pass a dict"):
        UlyssesConfig(2, sp_handler=4)
    with pytest.raises(UnsupportedError, match=r"weights='none'.* choose 'shard' or 'replicate'"):
        UlyssesConfig(2, weights="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["memory_budget", "host_budget"])
def test_bad_budget_is_refused_at_once(name: str) -> None:
    config = UlyssesConfig(sp_size=2, **{name: "40GB"})  # type: ignore[arg-type]
    assert repr(config) == f"UlyssesConfig(sp_size=2, {name}='40GB')"
    with pytest.raises(UnsupportedError, match=f"{name}='much': pass bytes above 0, such as 40e9 or '40GB'"):
        UlyssesConfig(sp_size=2, **{name: "much"})  # type: ignore[arg-type]


def test_bad_memory_is_refused_at_once(tmp_path: Path) -> None:
    config = UlyssesConfig(sp_size=2, memory=MappingProxyType({"offload": False}))
    assert repr(config) == "UlyssesConfig(sp_size=2, memory={'offload': False})"
    arguments = TrainingArguments(str(tmp_path), parallelism_config=config)
    assert json.loads(arguments.to_json_string())["parallelism_config"]["memory"] == {"offload": False}
    with pytest.raises(MemoryPlanError, match="'offloads' is nothing to decide of a memory plan"):
        UlyssesConfig(sp_size=2, memory={"offloads": True})
    with pytest.raises(UnsupportedError, match="memory='most': pass 'auto', None, a dict of choices"):
        UlyssesConfig(sp_size=2, memory="most")  # type: ignore[arg-type]


def test_training_arguments_round_trip_json_and_pickle(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), parallelism_config=UlyssesConfig(sp_size=2, kernel="cpu"))
    assert json.loads(arguments.to_json_string())["parallelism_config"]["kernel"] == "cpu"
    record = arguments.to_dict()["parallelism_config"]
    for stand_in in (
        record,
        pickle.loads(pickle.dumps(record)),
        pickle.loads(pickle.dumps(arguments.parallelism_config)),
    ):
        assert (stand_in.settings.sp_size, stand_in.sp_size, stand_in.mesh) == (2, 1, None)
    assert not hasattr(record, "nothing_of_that_name")


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_unknown_release_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(library_versions, "version", lambda asked: "99.1.0" if asked == name else real(asked))
    with pytest.raises(
        UnsupportedError, match=rf"not run with {name} 99.1.0: tested are accelerate 1\.15, .*trl 1\.16"
    ):
        UlyssesConfig(sp_size=2)
    assert UlyssesConfig(sp_size=2, allow_untested=True).settings.allow_untested


def test_installed_releases_are_tested() -> None:
    for name, known in library_versions.TESTED.items():
        assert ".".join(metadata.version(name).split(".")[:2]) in known


def test_one_process_with_degree_two_says_what_to_type() -> None:
    reset()
    with pytest.raises(ithaca.MeshError, match=r"sp=2 .* 1 process: start 2 processes \(torchrun --nproc-per-node 2"):
        Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=2))
    reset()


def _prepared(**options: Any) -> Any:
    reset()
    settings = {key: options.pop(key) for key in ("sp_handler", "whole_logits", "memory_budget") if key in options}
    accelerator = Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=2, **settings), **options)
    return accelerator, accelerator.prepare(small_model("llama", dtype=torch.float32))


def _fp16() -> None:
    _prepared(mixed_precision="fp16")


def _compiled() -> None:
    from accelerate.utils import TorchDynamoPlugin

    _prepared(dynamo_plugin=TorchDynamoPlugin(backend="inductor"))


def _fixed_length() -> None:
    _, model = _prepared(sp_handler={"sp_seq_length_is_variable": False, "sp_seq_length": 16})
    assert model(**small_batch(1, 16)).loss.item() > 0
    model(**small_batch(1, 12))


def _too_small_a_budget() -> None:
    _, model = _prepared(memory_budget="10KB")
    model(**small_batch(1, 12))


def _hidden_states() -> None:
    _, model = _prepared()
    model(**small_batch(1, 12), output_hidden_states=True)


def _few_logits() -> None:
    _, model = _prepared()
    model(input_ids=small_batch(1, 12)["input_ids"], logits_to_keep=1)


def _too_many_ranks() -> None:
    reset()
    Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=3))


def _stale_gradients() -> None:
    reset()
    model = small_model("llama", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(**small_batch(1, 8)).loss.backward()
    optimizer.step()
    Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=2)).prepare(model, optimizer)


def _prompt_tuning() -> None:
    from peft import PromptTuningConfig, get_peft_model

    reset()
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = get_peft_model(small_model("llama", dtype=torch.float32), adapter)
    Accelerator(cpu=True, parallelism_config=UlyssesConfig(sp_size=2)).prepare(model)


def _neftune() -> None:
    train("unused", 2, neftune_noise_alpha=5.0)


@pytest.mark.parametrize(
    ("script", "error", "match"),
    [
        (_fp16, "UnsupportedError", "mixed_precision='fp16': use 'bf16'"),
        (_compiled, "UnsupportedError", "torch_compile=True"),
        (_fixed_length, "BatchError", "12 tokens a row, .* sp_seq_length=16"),
        (_too_small_a_budget, "MemoryPlanError", r"fits: UlyssesConfig\(\.\.\., memory_budget='\d+GiB'\)$"),
        (_hidden_states, "UnsupportedError", "output_hidden_states .*unsharded"),
        (_few_logits, "UnsupportedError", "logits_to_keep"),
        (_too_many_ranks, "MeshError", "sp=3 does not divide a world of 2 processes"),
        (_stale_gradients, "UnsupportedError", "has a gradient, .* call model.zero_grad\\(\\) before"),
        (_prompt_tuning, "UnsupportedError", "PromptTuningConfig puts tokens of its own .* use LoRA"),
        (_neftune, "UnsupportedError", "neftune_noise_alpha"),
    ],
)
def test_unsupported_setting_is_refused(script: Any, error: str, match: str) -> None:
    expect_refusal(2, script, error=error, match=match)


def _bf16() -> Any:
    accelerator, model = _prepared(mixed_precision="bf16")
    weight = next(model.parameters())
    loss = model(**small_batch(1, 16)).loss
    accelerator.backward(loss)
    return str(weight.dtype), str(weight.grad.dtype), loss.item()


@pytest.mark.slow
def test_bf16_computes_in_bf16_over_fp32_weights() -> None:
    alone = small_model("llama", dtype=torch.float32)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("ignore")
        expected = alone(**small_batch(1, 16)).loss.item()
    for dtype, gradient, loss in run_ranks(2, _bf16):
        assert (dtype, gradient) == ("torch.float32", "torch.float32")
        assert loss == pytest.approx(expected, rel=BF16_LOSS)


def _logits_alone() -> Any:
    _, model = _prepared()
    ids = small_batch(2, 13)["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits
        generated = model.generate(ids, max_new_tokens=3, do_sample=False, min_new_tokens=3)
    return whole, generated


def test_call_without_labels_gives_whole_logits() -> None:
    ids = small_batch(2, 13)["input_ids"]
    alone = small_model("llama", dtype=torch.float32)
    with torch.no_grad():
        expected = alone(ids).logits
        written = alone.generate(ids, max_new_tokens=3, do_sample=False, min_new_tokens=3)
    for whole, generated in run_ranks(2, _logits_alone):
        assert float((whole - expected).abs().max()) < LOGITS
        assert torch.equal(generated, written)
