"""The benchmark of two versions in turns: its cells, its order, and two trees run on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import versions
from benchmarks.stamps import HERE, figures_of
from tests.ranks import ROOT


def test_version_cells_are_parsed_or_refused() -> None:
    [one, two] = versions.parse_cells("8B:32K@40,1B:256K@24")
    assert (one["model"], one["length"], one["settings"]["budget_gib"]) == ("8B", 2**15, 40.0)
    assert (two["model"], two["length"]) == ("1B", 2**18)
    with pytest.raises(SystemExit, match="8B:32K: write model:length@GiB"):
        versions.parse_cells("8B:32K")


def test_versions_take_turns_and_the_first_changes() -> None:
    assert versions.turns("old", 3) == [HERE, "old", "old", HERE, HERE, "old"]


@pytest.mark.slow
def test_two_trees_run_in_turns_and_keep_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "versions.json"
    words = f"versions {file} --other {ROOT} --commit 1a2b3c4 --cells tiny:96@1 --rounds 2 --warmup 0 --device cpu"
    monkeypatch.setattr(sys, "argv", words.split())
    assert versions.main() == 0
    result = json.loads(file.read_text())
    cells = {cell["version"]: cell for cell in result["cells"]}
    assert {name: (cell["outcome"], len(cell["steps_s"])) for name, cell in cells.items()} == {
        HERE: ("done", 2),
        "1a2b3c4": ("done", 2),
    }
    assert cells[HERE]["loss"] == cells["1a2b3c4"]["loss"]
    assert cells[HERE]["seconds"] == min(cells[HERE]["steps_s"])
    assert [cell["version"] for _, _, cell in figures_of("versions", result)] == [HERE]
    assert list(result["measured"]["figures"]) == ["ithaca, tiny, 96, budget_gib=1.0, memory=auto, here"]


def test_failed_process_is_a_failed_cell() -> None:
    cell = versions.merged({"version": HERE}, {"outcome": "done", "seconds": 2.0, "steps_s": [2.0]})
    cell = versions.merged(cell, {"outcome": "failed", "error": "no card"})
    assert (cell["outcome"], cell["error"], cell["seconds"]) == ("failed", "no card", 2.0)
    assert versions.merged(cell, {"outcome": "done", "steps_s": [1.0]}) == cell
