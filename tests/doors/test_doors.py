"""Every habit of the table has the outcome that the page shows; faults are planted to show that the frame sees them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.doors.habits import Habit, check_scripts, exact, refused
from tests.doors.page import PAGE, page
from tests.doors.table import habits

TABLE = habits()
# As many of a door's habits run in `make test`.
QUICK = 3


def _cases() -> list[Any]:
    counted: Counter[str] = Counter()
    cases = []
    for habit in TABLE:
        counted[habit.door] += not habit.slow
        slow = habit.slow or counted[habit.door] > QUICK
        cases.append(pytest.param(habit, id=habit.label, marks=[pytest.mark.slow] if slow else []))
    return cases


@pytest.mark.parametrize("habit", _cases())
def test_habit_has_the_outcome_that_the_page_shows(habit: Habit) -> None:
    check_scripts([habit])
    habit.check()


def test_page_is_what_the_table_gives() -> None:
    assert PAGE.read_text() == page(TABLE), "run: python -m tests.doors.page --write"


def test_habits_have_names_of_their_own() -> None:
    labels = [habit.label for habit in TABLE]
    assert sorted(set(labels)) == sorted(labels)


def _off_by_a_little(sp: int | None) -> dict[str, Any]:
    return {"loss": 1.0 if sp is None else 1.0 + 1e-6, "weights": {"w": torch.zeros(2)}}


def _wrong_below(sp: int | None) -> dict[str, Any]:
    return {"weights": {"w": torch.zeros(2) if sp is None else torch.tensor([0.0, 1e-3])}}


def _silent(sp: int | None) -> dict[str, Any]:
    return {"loss": 1.0}


def test_habit_with_other_numbers_is_not_exact() -> None:
    for script in (_off_by_a_little, _wrong_below):
        with pytest.raises(AssertionError, match="is off by"):
            exact("planted", "fault", script).check()


def test_habit_that_raises_nothing_is_not_refused() -> None:
    with pytest.raises(AssertionError, match="no rank of 2 raised"):
        refused("planted", "fault", _silent, says="anything").check()
