"""The work of `ithaca plan`: function calls and imported modules, which are the same on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("own_folder")

ROOT = Path(__file__).resolve().parents[2]
USUAL = ("--model", "qwen3-8b", "--length", "1M", "--gpus", "8xH100")
SLOWEST = ("--model", "llama-3.1-405b", "--length", "128k", "--gpus", "8xH200", "--nodes", "16")
ANSWER = """
import sys
from ithaca.cli import app
from tests.counted import calls_of

calls = calls_of(lambda: app(sys.argv[1:], standalone_mode=False))
print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
print(len(sys.modules), calls)
"""
# A core of 2.5 GHz makes about two million calls in a second; starting Python and importing take half of one.
MOST_MODULES, MOST_CALLS = 600, 500_000


@pytest.mark.parametrize(
    "words",
    [USUAL, SLOWEST, (*SLOWEST, "--length", "1M", "--gpus", "8xH100"), (*SLOWEST, "--length", "max")],
    ids=["usual", "large", "long", "longest"],
)
def test_plan_answer_has_few_calls_and_no_torch(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", ANSWER, "plan", *words, "--write", "-"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    heavy, counts = done.stdout.splitlines()[-2:]
    assert heavy == "[]"
    modules, calls = map(int, counts.split())
    assert modules < MOST_MODULES
    assert calls < MOST_CALLS
