"""The tree keeps the rules of `tools/lint`, and `import ithaca` and `ithaca --help` stay quick."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.lint.floors import floor_faults, library_faults, missing_floor_faults
from tools.lint.habits import environment_faults, global_faults
from tools.lint.tree import tree_faults

ROOT = Path(__file__).resolve().parent.parent
# The checkers that the tree must pass; None: all of them.
HELD = {floor_faults, library_faults, environment_faults, global_faults, missing_floor_faults}


def test_tree_has_no_fault() -> None:
    faults = tree_faults(checkers=HELD)
    assert not faults, "\n".join(map(str, faults))


def best_of_three(*arguments: str) -> tuple[float, str]:
    """Seconds of work of one of a few runs, and what it printed: a busy machine's waits are not the command's."""
    best = float("inf")
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        after = os.times()
        worked = after.children_user + after.children_system - before.children_user - before.children_system
        best = min(best, worked)
        assert done.returncode == 0, done.stderr
        if best < 1:
            break
    return best, done.stdout


def test_import_is_quick_and_brings_no_torch() -> None:
    heavy = "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    seconds, output = best_of_three("-c", f"import sys, ithaca; {heavy}")
    assert output.strip() == "[]"
    assert seconds < 1


def test_help_answers_within_a_second() -> None:
    seconds, output = best_of_three("-m", "ithaca", "--help")
    assert "Usage" in output
    assert seconds < 1
