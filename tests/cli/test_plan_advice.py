"""What `ithaca plan` proposes when it refuses is typed as it stands, and plans."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest

Options = dict[str, str]


@pytest.fixture
def run(typed: Any, own_folder: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    return partial(typed, "plan", "--write", "-")


def words_of(options: Options) -> list[str]:
    return [word for pair in options.items() for word in pair]


def changed(options: Options, advice: str) -> Options:
    """The options with one piece of advice taken: what to leave out, and what to type."""
    what, _, left_out = advice.partition(" without ")
    if advice.startswith("leave "):
        what, left_out = "", advice
    dropped = re.findall(r"--[a-z]+", left_out)
    typed = dict(re.findall(r"(--[a-z-]+) ([^ ,]+)", what))
    return {name: value for name, value in options.items() if name not in dropped} | typed


REFUSED: list[Options] = [
    {"--model": "llama-3.1-8b", "--gpus": "2xA100-80GB", "--host-memory": "120GB", "--length": "1M"},
    {"--model": "llama-3.1-8b", "--gpus": "2xA100-80GB", "--host-memory": "120GB", "--sp": "2", "--length": "1M"},
    {"--model": "llama-3.1-8b", "--gpus": "4xH100", "--sp": "1", "--batch": "4", "--length": "1M"},
    {"--model": "llama-3.1-8b", "--gpus": "2xH100", "--nodes": "2", "--batch": "2", "--length": "2M"},
    {"--model": "llama-3.1-70b", "--gpus": "8xH100", "--host-memory": "400GB", "--optimizer": "adamw", "--length": "64k"},
    {"--model": "llama-3.1-70b", "--gpus": "8xRTX-4090", "--length": "128k"},
    {"--model": "qwen2.5-7b", "--gpus": "8xRTX-4090", "--host-memory": "256GB", "--headroom": "0.4", "--length": "1M"},
    {"--model": "gemma-3-4b-it", "--gpus": "9xA100-40GB", "--batch": "1", "--length": "4M"},
    {"--model": "llama-3.1-8b", "--gpus": "1xH200", "--host-memory": "125GiB", "--length": "500k"},
]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("options", REFUSED, ids=[" ".join(words_of(options)) for options in REFUSED])
def test_every_change_that_is_proposed_plans_when_it_is_typed(run: Any, options: Options) -> None:
    status, _, err = run(*words_of(options))
    assert status == 2
    advice = err.split("any one of these fits: ")[1].split(". More than")[0].strip().split("; ")
    assert len(advice) >= 2
    for each in advice:
        status, out, err = run(*words_of(changed(options, each)), "--json")
        assert status == 0, f"{each}: {err}"
        if "--sp" in options and "--sp" not in each:
            assert json.loads(out)["degrees"]["sp"] == int(options["--sp"])


def test_more_of_the_host_is_proposed_before_a_larger_one(run: Any) -> None:
    _, _, err = run(*words_of(REFUSED[-1]))
    assert "any one of these fits: --host-headroom 0.07; --host-memory " in err


LONGEST: list[Options] = [
    {"--model": "llama-3.1-70b", "--gpus": "8xH100", "--host-memory": "2T"},
    {"--model": "llama-3.2-1b", "--gpus": "3xH100", "--host-memory": "1T"},
    {"--model": "qwen3-8b", "--gpus": "8xH100", "--nodes": "5"},
    {"--model": "qwen3-8b", "--gpus": "8xH100", "--sp": "4", "--batch": "6"},
    {"--model": "qwen3-8b", "--gpus": "RTX-4090", "--tune": "lora"},
]


@pytest.mark.parametrize("options", LONGEST, ids=[" ".join(words_of(options)) for options in LONGEST])
def test_max_is_planned_as_a_length_and_one_step_more_is_refused(run: Any, options: Options) -> None:
    status, out, err = run(*words_of(options), "--length", "max", "--json")
    assert status == 0, err
    said = json.loads(out)
    again = json.loads(run(*words_of(options), "--length", str(said["length"]), "--json")[1])
    assert again == said
    at_all = next(label for label in said["reach"] if label.startswith("longest with any settings"))
    assert said["reach"][at_all] == said["length"]
    # The numerics that it takes are those of the plan.
    recipe = said["recipe"]
    assert f", {recipe['optimizer']}, " in at_all
    assert ("on the host" in at_all) == recipe["on_host"]
    status, _, err = run(*words_of(options), "--length", str(said["length"] + 1024))
    assert status == 2
    assert int(re.findall(r"--length (\d+)k", err)[0]) * 1024 == said["length"]


def test_a_plan_that_leaves_gpus_idle_says_so(run: Any) -> None:
    words = ("--model", "qwen3-8b", "--gpus", "8xH100", "--nodes", "5", "--length", "3M")
    status, out, _ = run(*words)
    assert status == 0
    assert "dp=1, sp=32 on 32 of 40 GPUs, 8 in each of 4 nodes" in out
    assert "torchrun --nnodes 4" in out
    said = json.loads(run(*words, "--json")[1])
    assert said["used"] == {"gpus": 8, "nodes": 4}
    assert (said["machine"]["gpus"], said["machine"]["nodes"]) == (8, 5)
