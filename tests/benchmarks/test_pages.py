"""Tables of the pages: made from results, between markers; the committed pages have what the committed results give."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from benchmarks import pages
from benchmarks.longest import derived
from benchmarks.stamps import ROOT
from tests.tolerances import TRACED_MEMORY


def cell(system: str, model: str, length: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "system": system, "model": model, "length": length, "seconds": seconds, "outcome": "done", "settings": {}, **more
    }  # fmt: skip


def test_markdown_table_has_a_rule_below_its_heading() -> None:
    assert pages.markdown([("", "b"), ("c", "")]) == "| | b |\n|---|---|\n| c | |"


def test_steps_table_has_systems_down_and_the_factor_to_the_floor() -> None:
    cells = [
        cell("floor", "8B", 32768, 2.0),
        cell("floor", "1B", 65536, 1.0),
        cell("ithaca", "1B", 65536, 1.5, settings={"budget_gib": 24.0}, allocated_gib=20.0),
        cell("ithaca", "8B", 32768, 2.5, settings={"budget_gib": 40.0}, allocated_gib=39.0),
        cell("ithaca", "8B", 32768, 2.2, settings={"budget_gib": 128.0}, allocated_gib=99.0),
        cell("liger", "8B", 32768, 3.0, outcome="out of memory", allocated_gib=70.0),
    ]
    heading, _, *rows = pages.steps({"cells": cells}).splitlines()
    assert heading == "| | 8B, 32K | 1B, 64K |"
    found = {row.split("|")[1].strip(): [word.strip() for word in row.split("|")[2:-1]] for row in rows}
    assert found["**Ithaca**, budget 40 and 24 GiB"] == ["**2.5 s, 39.0 GiB**, 1.25x", "**1.5 s, 20.0 GiB**, 1.50x"]
    assert found["**Ithaca**, budget 128 GiB"] == ["**2.2 s, 99.0 GiB**, 1.10x", ""]
    assert found["transformers + Liger"] == ["out of memory (at 70.0 GiB)", ""]


def test_other_kernel_stands_beside_the_same_step_measured_last() -> None:
    plain, packed = {"budget_gib": 40.0}, {"budget_gib": 40.0, "documents": "2048"}
    found = {
        "cells": [cell("ithaca", "8B", 32768, 3.0, settings=packed), cell("ithaca", "8B", 32768, 4.5, settings=plain)]
    }
    last = {
        "cells": [cell("ithaca", "8B", 32768, 5.0, settings=plain), cell("ithaca", "8B", 32768, 4.0, settings=packed)]
    }
    last["cells"].insert(0, cell("ithaca", "8B", 32768, 9.0, settings=plain, version="1a2b3c4"))
    early = {"cells": [cell("ithaca", "8B", 32768, 8.0, settings=plain)]}
    assert pages.other_kernel(found, [last, early]).splitlines()[2:] == [
        "| 8B, 32K | 40 GiB | 5.00 s | **4.50 s** | 10% less |",
        "| 8B, 32K, documents of 2,048 tokens | 40 GiB | 4.00 s | **3.00 s** | 25% less |",
    ]


def test_longest_table_puts_the_larger_model_first() -> None:
    settings = {"optimizer": "adamw", "budget_gib": 130.0, "layers": 16}
    more = {"allocated_gib": 120.0, "pinned_gib": 80.0, "settings": settings}
    cells = [cell("ithaca", "1B", 1048576, 600.0, **more), cell("ithaca", "8B", 524288, 500.0, **more)]
    first, second = pages.longest_steps({"cells": cells}).splitlines()[2:]
    assert first == "| 8B, AdamW | 524,288 | 500.0 s | 120.0 GiB | 80.0 GiB |"
    assert second.startswith("| 1B, AdamW | 1,048,576 |")


def test_training_tables_have_a_row_a_host() -> None:
    run = {
        "taken": [{"loss": 3.0}, {"loss": 1.0}], "length": 4096, "memory_gib": {"peak": 9.0},
        "median": {"tokens_per_second": 1234.0, "utilisation": 0.5},
    }  # fmt: skip
    assert pages.training_run({"run": run, "run_on_a_slow_host": run}).splitlines()[2] == (
        "| 2 steps at 4,096 tokens, quiet host | 1,234 | 50.0% | 3.00 to 1.00 | 9.0 GiB |"
    )
    part = {"bare_s": 0.1, "overhead": 0.01, "outside": 0.005}
    found = {"overhead": part | {"between": 0.02}, "overhead_at_start": part, "overhead_on_a_slow_host": part}
    rows = pages.training_overhead(found).splitlines()
    assert rows[2] == "| host ahead of the device | 100 ms | 1.0% | 0.5% | 2.0% |"
    assert rows[3].endswith("| 1.0% | 0.5% | |")


def test_table_put_between_markers_leaves_the_rest() -> None:
    page = "a\n<!-- begin: x -->\nold\n<!-- end: x -->\nb\n<!-- begin: y -->\nold\n<!-- end: y -->\n"
    assert pages.put(page, "x", "| new |") == page.replace("x -->\nold", "x -->\n| new |")
    assert pages.put(page, "z", "| new |") == page
    assert pages.names_in(page) == ["x", "y"]


# A table that no page shows.
UNSHOWN = {"rehearsals matched"}


def test_every_table_has_one_page() -> None:
    shown = Counter(name for page in pages.PAGES for name in pages.names_in((ROOT / page).read_text()))
    assert {name: shown[name] for name in pages.TABLES if name not in UNSHOWN} == dict.fromkeys(
        pages.TABLES.keys() - UNSHOWN, 1
    )


@pytest.mark.parametrize("page", pages.PAGES)
def test_page_tables_are_what_the_results_give(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in (name for name in pages.names_in(text) if name in pages.TABLES):
        assert pages.put(text, name, pages.TABLES[name]()) == text, f"{name}: run python -m benchmarks.pages --write"


def test_errors_are_measured_at_every_length_shown() -> None:
    claimed = {(one["model"], one["length"]) for name in ("step", "longest") for one in pages.result(name)["cells"]}
    assert {(one["model"], one["length"]) for one in pages.result("exact")["cells"]} == claimed


def test_trainer_measured_adds_less_than_two_percent() -> None:
    found = pages.result("training")
    assert len(found["run"]["taken"]) >= 50
    assert max(found["overhead"][kind] for kind in ("overhead", "outside", "between")) < 0.02


def test_losses_measured_ithaca_is_the_fastest() -> None:
    seconds = {(row["shape"], row["system"]): row["seconds"] for row in pages.result("losses")["rows"]}
    fastest = {min((s, name) for (shape, name), s in seconds.items() if shape == at)[1] for at, _ in seconds}
    assert fastest == {"ithaca"}


def test_longest_steps_measured_stay_within_the_host() -> None:
    found = pages.result("longest")
    whole = [one for one in found["cells"] if "whole" not in one]
    assert {(one["model"], one["length"]) for one in whole} == {("8B", 524_288), ("1B", 1_048_576)}
    assert max(one["host_gib"] for one in whole) < 125
    for one in [*whole, *derived(found)]:
        # Without a budget three quarters of the host's 128 GiB.
        assert one["pinned_gib"] <= one["settings"].get("host_budget_gib", 96)


def test_memory_measured_grows_evenly_with_length() -> None:
    cells = json.loads((ROOT / "benchmarks/results/lengths.json").read_text())["cells"]
    # Shorter rows have their peak in a tile of the loss.
    points = sorted((one["length"], one["allocated_gib"]) for one in cells if one["length"] >= 32 * 1024)
    first, *rest = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(points)]
    assert rest
    assert rest == pytest.approx([first] * len(rest), rel=TRACED_MEMORY)


def test_reach_measured_is_four_times_as_long() -> None:
    from benchmarks.reach import TIMES

    [one] = pages.result("reach")["cells"]
    assert one["ithaca"]["outcome"] == "done"
    assert one["ithaca"]["tokens"] == TIMES * one["transformers"]["tokens"]
