"""Public names, options, statuses and architectures of an earlier version are there."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest

import ithaca
from tests.compat.held import Typed, read, run_alone

NAMES = read("names.json")
STATUSES = read("statuses.json")


@pytest.mark.parametrize("name", NAMES)
def test_public_name_of_then_takes_the_same_arguments(name: str) -> None:
    then = NAMES[name]
    assert name in ithaca.__all__
    value: Any = getattr(ithaca, name)
    if "bases" in then:
        bases = {base.__name__ for base in value.__mro__}
        assert set(then["bases"]) <= bases
        assert set(then["attributes"]) <= set(dir(value))
    if "parameters" not in then:
        return
    now = list(inspect.signature(value).parameters.values())
    plain = [[one.name, one.kind.name, None if one.default is one.empty else repr(one.default)] for one in now]
    placed = [one for one in then["parameters"] if one[1] != "KEYWORD_ONLY"]
    # What may be given by place stays where it was; what has come since can be left out.
    assert plain[: len(placed)] == placed
    assert [one for one in then["parameters"] if one not in plain] == []
    added = [one for one, entry in zip(now, plain, strict=True) if entry not in then["parameters"]]
    needed = [
        one.name for one in added if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    assert needed == []


@pytest.mark.parametrize("verb", read("options.json"))
def test_verb_of_then_has_the_same_options(verb: str, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, page, _ = typed(f"{verb} --help")
    assert status == 0
    assert set(read("options.json")[verb]) <= set(re.findall(r"--[a-z][a-z-]+", page))


@pytest.mark.parametrize(
    ("words", "status"),
    [pytest.param(one["words"], one["status"], marks=[pytest.mark.slow] * (not one["quick"])) for one in STATUSES],
)
def test_command_of_then_ends_with_the_same_status(words: str, status: int, typed: Typed) -> None:
    # Training joins a process group, which stays in its process.
    found, said = run_alone(words) if words.startswith("train") and "--show" not in words else typed(words)[::2]
    assert found == status, said


def test_architectures_of_then_are_exact_still(typed: Typed) -> None:
    then = read("reports/models.json")
    status, printed, _ = typed("models --json")
    now = json.loads(printed)
    assert status == 0
    lost = [kind for kind, row in then.items() if row["verdict"] == "exact" and now[kind]["verdict"] != "exact"]
    assert lost == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind, row in read("reports/models.json").items() if row["verdict"] == "exact"]
)
def test_small_model_of_an_architecture_of_then_is_built(kind: str, typed: Typed) -> None:
    # So many ranks are refused when the model is there, before they are started.
    status, _, said = typed(f"verify --model {kind} --sp 64")
    assert status == 2
    assert "heads over sp=64" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma2", "gpt_neox"])
def test_verify_of_an_architecture_of_then_ends_well(kind: str, typed: Typed) -> None:
    status, printed, said = typed(f"verify --model {kind} --device cpu")
    assert status == 0, printed + said
