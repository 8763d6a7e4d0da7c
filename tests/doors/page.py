"""docs/habits.md, made from the table: `python -m tests.doors.page --write`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from tests.doors.habits import Habit
from tests.doors.table import habits

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "habits.md"
HEAD = """# Habits

What people do around a model, and what comes of it under Ithaca. Every line is a test in `tests/doors/`, which runs the
same script on one process of plain transformers and on several ranks. *exact* means the numbers of the one process.
*refused* means one sentence on every rank that names the way that works, given here where it is short. *absent* means
that there is nothing to compare, for the reason given.
The page is written from the tests by `python -m tests.doors.page --write`.
"""


def page(entries: list[Habit]) -> str:
    """The page's text: a table for every door."""
    parts = [HEAD]
    for door, of_door in groupby(entries, key=lambda habit: habit.door):
        rows = [f"| {habit.name} | {habit.outcome} | {_remark(habit)} |" for habit in of_door]
        parts.append("\n".join([f"## {door}", "", "| habit | outcome | |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _remark(habit: Habit) -> str:
    return (habit.note or (habit.says if habit.outcome == "absent" else "")).replace("|", "\\|")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(habits()))
    else:
        print(page(habits()))
