"""JSON reports have every key that they had; a calibration of then is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.compat.held import FILES, Typed, missing, read
from tests.compat.make import REPORTS, WRITTEN_REPORTS

# Labels of lengths, of which the second goes on with the settings that it takes: they were reworded once since then.
REWORDED = {
    "longest that fits, so cut": "longest that fits on this mesh",
    "longest at all": "longest with any settings",
}


def earlier(name: str) -> Any:
    """A report of then, with today's labels of lengths."""
    then = read(f"reports/{name}.json")
    if "reach" in then:
        labels = [(*label.partition(":"), length) for label, length in then["reach"].items()]
        then["reach"] = {REWORDED.get(word, word) + colon + takes: length for word, colon, takes, length in labels}
    return then


def report(words: str, typed: Typed) -> Any:
    status, printed, said = typed(words)
    assert status == 0, said
    return json.loads(printed)


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one == "doctor")) for one in REPORTS])
def test_printed_report_has_the_keys_of_then(name: str, typed: Typed) -> None:
    assert missing(earlier(name), report(REPORTS[name], typed)) == []


@pytest.mark.slow
def test_doctor_looks_at_all_that_it_did(typed: Typed) -> None:
    # Not at each by name: which cards and kernels there are differs.
    now = {row["topic"] for row in json.loads(typed("doctor --json")[1])}
    assert {row["topic"] for row in read("reports/doctor.json")} <= now


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN_REPORTS)
def test_written_report_has_the_keys_of_then(name: str, work: Path, typed: Typed) -> None:
    status, _, said = typed(f"{WRITTEN_REPORTS[name]} --json report.json")
    assert status == 0, said
    assert missing(earlier(name), json.loads((work / "report.json").read_text())) == []


def test_calibration_of_then_is_what_a_plan_counts_with(work: Path, typed: Typed) -> None:
    without = report(REPORTS["plan"], typed)
    (work / "home" / "ithaca").mkdir(parents=True)
    shutil.copy(FILES / "reports" / "calibration.json", work / "home" / "ithaca")
    with_it, then = report(REPORTS["plan"], typed), earlier("plan_measured")
    assert (without["machine"]["measured"], with_it["machine"]["measured"]) == (False, True)
    assert with_it != without
    assert missing(then, with_it) == []
