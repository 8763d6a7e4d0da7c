"""What `ithaca plan` refuses: one line, status 2, nothing written."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.planning.models import LLAMA_8B

# What no model has, and what is said of it.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"intermediate_size": 0}, "intermediate_size: got 0"),
    "negative_width": ({"intermediate_size": -5}, "intermediate_size: got -5"),
    "window": ({"sliding_window": -5, "model_type": "mistral"}, "sliding_window: got -5"),
    "positions": ({"max_position_embeddings": -4}, "max_position_embeddings: got -4"),
    "original": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": -8}},
        "rope_scaling.original_max_position_embeddings: got -8",
    ),
    "experts": (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 20},
        "values that no causal language model has",
    ),
}


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def run(typed: Any) -> Any:
    return partial(typed, "plan")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "lama-3.1-8b"), "did you mean meta-llama/Llama-3.1-8B"),
        (("--model", "./nowhere"), "no such folder here: a folder with config.json is needed"),
        (("--model", "qwen3-8b", "--gpus", "H100x8"), "the number comes first, such as 8xH100"),
        (("--model", "qwen3-8b", "--gpus", "A100-80GB x 4"), "the number comes first, such as 4xA100-80GB"),
        (("--model", "qwen3-8b", "--gpus", "8xH1000"), "no card 'H1000' in the table: nearest are H100"),
        (("--model", "qwen3-8b", "--gpus", "0xH100"), "such as 8xH100"),
        (("--model", "qwen3-8b", "--gpus", "H100:8"), "such as 8xH100"),
        (("--model", "qwen3-8b", "--gpus", "H100 x 8"), "such as 8xH100"),
        (("--model", "qwen3-8b", "--gpus", "8-H100"), "such as 8xH100"),
        (("--model", "qwen3-8b", "--gpus", "4xH100+4xH200"), "such as 8xH100"),
        (("--model", "qwen3-8b", "--nodes", "0"), "--nodes 0: at least 1"),
        (("--model", "qwen3-8b", "--price", "-3", "--tokens", "2B"), "--price -3: a number above 0"),
        (("--model", "qwen3-8b", "--price", "2.5"), "give --tokens too"),
        (("--model", "qwen3-8b", "--target-tok-s", "nan"), "a number above 0"),
        (("--model", "qwen3-8b", "--host-memory", "512"), "write a unit, such as 512GB"),
        (("--model", "qwen3-8b", "--spec", "."), "--spec . cannot be written"),
        (("--model", "qwen3-8b", "--write", "."), "--write . cannot be written"),
        (("--model", "qwen3-8b", "--network", "Infiniband"), "nearest are InfiniBand"),
        (("--model", "qwen3-8b", "--length", "12Q"), "'12Q' is no number"),
        (("--model", "qwen3-8b", "--length", "0"), "--length 0: at least 2"),
        (("--model", "qwen3-8b", "--length", "1"), "--length 1: at least 2"),
        (("--model", "qwen3-8b", "--lora-rank", "64"), "--lora-rank 64 is of adapters: add --tune lora"),
        (("--model", "qwen3-8b", "--tune", "lora", "--lora-rank", "-3"), "--lora-rank -3: at least 1"),
        (("--model", "qwen3-8b", "--length", "900M"), "do not fit 8xH100"),
        (("--model", "qwen3-8b", "--host-memory", "lots"), "no amount of memory"),
        (("--model", "qwen3-8b", "--tokens", "many"), "'many' is no number"),
        (("--model", "qwen3-8b", "--sp", "3"), "sp=3 over 8 GPUs and 32 heads"),
        (("--model", "qwen3-8b", "--batch", "0"), "--batch 0: at least 1"),
        (("--model", "qwen3-8b", "--headroom", "1"), "--headroom 1"),
        (
            ("--model", "qwen3-8b", "--host-headroom", "0.01"),
            "--host-headroom 0.01: a share of the memory from 0.07 to below 1, such as 0.25, is needed",
        ),
        (("--model", "qwen3-8b", "--tune", "some"), "choose one of full, lora"),
        (("--model", "qwen3-8b", "--optimizer", "sgd"), "choose one of adamw"),
        (("--model", "qwen3-8b", "--precision", "fp16"), "choose one of mixed, bf16"),
        (("--model", "qwen3-8b", "--precision", "mixed", "--optimizer", "bf16_sr"), "rounds bf16 weights"),
        (("--model", "not.json"), "not.json is no config.json"),
        (("--model", "list.json"), "list.json is no config.json: it holds []"),
        (("--model", "other.json"), "it has no model_type"),
        (("--model", "odd.json"), "num_attention_heads: got 'many'"),
        *((("--model", f"{key}.json"), said) for key, (_, said) in WRONG.items()),
        (("--model", "missing.json"), "does not exist"),
        (("--model", "empty"), "does not exist"),
        ((), "--model"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run: Any, words: tuple[str, ...], said: str) -> None:
    Path("not.json").write_text("{")
    Path("list.json").write_text("[]")
    Path("other.json").write_text('{"name": "package"}')
    for key, (value, _) in WRONG.items():
        Path(f"{key}.json").write_text(json.dumps({**LLAMA_8B, **value}))
    Path("odd.json").write_text(json.dumps({**LLAMA_8B, "num_attention_heads": "many"}))
    Path("empty").mkdir()
    status, out, err = run(*words)
    assert status == 2
    assert said in err
    assert "Traceback" not in out + err
    assert not Path("run.yaml").exists()
