"""The whole table: the entries of every door, in the order of the page."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.doors.habits import Habit

# A module of entries defines HABITS. Those that come first here come first on the page; others follow by name.
_FIRST = ("plain", "plain_batch", "plain_steps", "plain_changed", "trainer", "trainer_changed", "accelerator", "trl")


def habits() -> list[Habit]:
    """Every entry of every module beside this one that defines HABITS."""
    found = {path.stem for path in Path(__file__).parent.glob("*.py") if "HABITS" in path.read_text()} - {
        "table",
        "__init__",
    }
    ordered = [name for name in _FIRST if name in found] + sorted(found - set(_FIRST))
    return [habit for name in ordered for habit in import_module(f"tests.doors.{name}").HABITS]
