"""docs/habits.md, made from the table: `python -m tests.doors.page --write`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from tests.doors.habits import Habit
from tests.doors.table import habits

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "habits.md"
HEAD = """# Habits: common code around a model

Each line is something that people do around a model, with its outcome under Ithaca. The sections are the ways to use
Ithaca: a PyTorch loop, Trainer, Accelerator, and each trainer of TRL. Every line is a test in `tests/doors/`, which runs
the same script in one process of plain transformers and on several ranks.

| outcome | meaning |
|---|---|
| exact | the numbers of one process |
| refused | an error on every rank, in one sentence, that names what works instead; the remark repeats it where it is short |
| absent | there is nothing to compare; the remark gives the reason |

`python -m tests.doors.page --write` writes this page from the tests.
"""


def page(entries: list[Habit]) -> str:
    """The page's text: a table for every door."""
    parts = [HEAD]
    for door, of_door in groupby(entries, key=lambda habit: habit.door):
        rows = [f"| {habit.name} | {habit.outcome} | {_remark(habit)} |" for habit in of_door]
        parts.append("\n".join([f"## {door}", "", "| habit | outcome | remark |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _remark(habit: Habit) -> str:
    return (habit.note or (habit.says if habit.outcome == "absent" else "")).replace("|", "\\|")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(habits()))
    else:
        print(page(habits()))
