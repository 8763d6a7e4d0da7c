"""`benchmarks.rehearsals`: what it would run, and tables and plot of what a file has."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks import rehearsal_cells, rehearsal_page, rehearsals
from benchmarks.step import show_length

ROOT = Path(__file__).parents[2]


def done(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    predicted = {"device_bytes": 11 * 10**9, "compute_s": 11.0, "step_s": 12.0, "kinds": {}, "host_bytes": 0}
    given = {
        "outcome": "done", "peak": 10 * 10**9, "reserved": 12 * 10**9, "pinned": 0, "host": 0, "compute_s": 10.0, "step_s": 10.5,
        "memory_error": 0.1, "time_error": 0.1, "derived": True, "how": "3 and 6 of 36 layers run", "spent_s": 9.0,
        "predicted": predicted, "exchanges": [{"seconds": 0.5}], "link": "NVLink 4, 450 GB/s",
    }  # fmt: skip
    return of | given | more


def test_the_groups_have_their_cells() -> None:
    assert len(rehearsal_cells.cells_of("plan")) == 25
    assert (
        len({rehearsal_cells.key(c) for group in rehearsal_cells.GROUPS for c in rehearsal_cells.cells_of(group)}) == 42
    )
    [whole] = rehearsal_cells.cells_of("whole")
    words = rehearsals.words_of(whole, whole["model"], Path("a.json"), [])
    assert words[0] == "rehearse"
    assert words[words.index("--length") : words.index("--json")] == ["--length", "1048576", "--world", "8"]
    with pytest.raises(SystemExit, match="choose among plan, capped"):
        rehearsal_cells.cells_of("some")


def test_tables_name_the_worst_and_what_failed(tmp_path: Path) -> None:
    first, second, *_ = rehearsal_cells.cells_of("plan")
    cells = [done(first), done(second, memory_error=-0.2), rehearsal_cells.cells_of("plan")[2] | {"outcome": "failed"}]
    table = rehearsal_page.plan_table(cells)
    assert "| Llama-3.2-1B | 1 | 32K | 10.00 | 11.00 | +10.0% | 10.00 | 11.00 | +10.0% | derived |" in table
    assert "Worst of 2, memory error: -20.0% (Meta-Llama-3-8B, sp=1, 32K)." in table
    assert "| Qwen3-4B | 1 | 32K | failed |" in table
    rehearsal_page.plot(cells, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_efficiency_and_published_figures() -> None:
    scaling = [done(c, step_s=s) for c, s in zip(rehearsal_cells.cells_of("scaling"), (16.0, 8.0, 5.0), strict=False)]
    table = rehearsal_page.scaling_table(scaling)
    assert "| 2 | 8.00 | 10.00 | 0.50 (predicted, NVLink 4, 450 GB/s) | 16,384 | 100.0% |" in table
    assert "| 80.0% |" in table
    assert "| 8K | 12.00 | 23.4 |" in rehearsal_page.capped_table([done(rehearsal_cells.cells_of("capped")[0])])


def test_what_two_groups_have_is_run_once(tmp_path: Path) -> None:
    [planned] = [c for c in rehearsal_cells.cells_of("plan") if (c["model"], c["sp"]) == ("Qwen/Qwen3-4B", 4)]
    scaling = [c for c in rehearsal_cells.cells_of("scaling") if c["sp"] == 4]
    result: dict[str, Any] = {"runs": [], "cells": [done(planned)]}
    arguments = argparse.Namespace(again=False, total=600.0, limit=600.0, extra="", file=tmp_path / "all.json")
    with patch.object(rehearsals, "run_cell") as run:
        rehearsals.run_all(scaling, result, arguments, waiting=None)  # type: ignore[arg-type]
    run.assert_not_called()
    assert [c["group"] for c in result["cells"]] == ["plan", "scaling"]
    assert result["cells"][1] == result["cells"][0] | {"group": "scaling"}
    assert result["runs"][0].keys() >= {"command", "python", "torch", "transformers"}


def test_the_experts_are_a_config_that_loads(tmp_path: Path) -> None:
    from ithaca.models.pretrained import read_config

    config = read_config(rehearsals.write_experts(tmp_path))
    assert (config.model_type, config.num_hidden_layers, config.num_experts) == ("qwen3_moe", 6, 128)


@pytest.mark.slow
def test_a_cell_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    of = rehearsal_cells.cell("plan", "embedded", 2, "1K", "precision=fp32")
    with closing(rehearsals.Waiting()) as waiting:
        got = rehearsals.run_cell(of, 300, [], waiting)
        assert got["outcome"] == "done", got.get("error")
        assert got["derived"] is False
        assert json.dumps(got)
        short = rehearsals.run_cell(of, 0.5, [], waiting)
        assert short["outcome"] == "over the limit"
        wrong = rehearsals.run_cell(of | {"settings": ["mesh.sq=2"]}, 300, [], waiting)
    assert wrong["outcome"] == "failed"
    assert "unknown key 'sq' in mesh" in wrong["error"]


def test_the_page_shows_what_the_file_has() -> None:
    cells = json.loads((ROOT / "benchmarks/results/rehearsals.json").read_text())["cells"]
    page = (ROOT / "docs/rehearse.md").read_text()
    assert rehearsal_page.put_into(page, cells) == page
    for c in (c for c in cells if c["group"] == "plan"):
        assert f"| {rehearsal_cells.short_name(c)} | {c['sp']} | {show_length(c['length'])} |" in page
