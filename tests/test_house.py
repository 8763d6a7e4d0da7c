"""The tree keeps the rules of `tools/lint`, and `import ithaca` and `ithaca --help` import little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.lint.tree import tree_faults

ROOT = Path(__file__).resolve().parent.parent


def test_tree_has_no_fault() -> None:
    faults = tree_faults()
    assert not faults, "\n".join(map(str, faults))


def imported_by(*arguments: str) -> tuple[set[str], str]:
    """Return the modules that a fresh interpreter has imported when the command ends, and what the command printed."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert done.returncode == 0, done.stderr
    return {line.rpartition("|")[2].strip() for line in lines}, done.stdout


# Imports are what a start takes its time for. A count is the same on every machine, seconds are not.
@pytest.mark.parametrize(
    ("arguments", "said", "most"),
    [(("-c", "import ithaca"), "", 120), (("-m", "ithaca", "--help"), "Usage", 700)],
    ids=["import", "help"],
)
def test_start_imports_few_modules_and_no_torch(arguments: tuple[str, ...], said: str, most: int) -> None:
    modules, printed = imported_by(*arguments)
    assert said in printed
    assert modules & {"torch", "transformers", "numpy"} == set()
    assert "ithaca" in modules
    assert len(modules) < most
