"""`benchmarks.rehearsals`: its cells, and the tables and the plot of its file."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks import rehearsal_cells, rehearsal_page, rehearsal_plan, rehearsals
from benchmarks.step import show_length
from ithaca.planning.plan import Job
from ithaca.planning.search.choose import choose_plan
from tests.tolerances import PLANNED_MEMORY, PREDICTED_STEP

ROOT = Path(__file__).parents[2]


def done(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    predicted = {"device_bytes": 11 * 10**9, "compute_s": 11.0, "step_s": 12.0, "kinds": {}, "host_bytes": 0}
    predicted |= {"job": asdict(Job(of["length"], sp=of["sp"])), "budgets": [int(1e11), int(1e11)]}
    plan = choose_plan(rehearsal_plan.sizes_of(of["model"]), Job(**predicted["job"]), *predicted["budgets"])
    given = {
        "outcome": "done", "peak": 10 * 10**9, "reserved": 12 * 10**9, "pinned": 0, "host": 0, "compute_s": 10.0, "step_s": 10.5,
        "memory_error": 0.1, "time_error": 0.1, "derived": True, "how": "3 and 6 of 36 layers run", "spent_s": 9.0,
        "predicted": predicted | {"plan": asdict(plan)}, "exchanges": [{"seconds": 0.5}], "link": "NVLink 4, 450 GB/s",
        "machine": {"device": "H200", "gpus": of["sp"], "nodes": 1}, "rows": 1, "planned_so_today": True,
    }  # fmt: skip
    return of | given | more


def test_rehearsal_groups_have_their_cells() -> None:
    assert len(rehearsal_cells.cells_of("plan")) == 25
    assert (
        len({rehearsal_cells.key(c) for group in rehearsal_cells.GROUPS for c in rehearsal_cells.cells_of(group)}) == 41
    )
    [whole] = rehearsal_cells.cells_of("whole")
    # The whole rank is one of the plan's cells; it need not run twice.
    assert rehearsal_cells.asked(whole) in map(rehearsal_cells.asked, rehearsal_cells.cells_of("plan"))
    words = rehearsals.words_of(whole, whole["model"], Path("a.json"), [])
    assert words[0] == "rehearse"
    assert words[words.index("--length") : words.index("--json")] == ["--length", "1048576", "--world", "8"]
    with pytest.raises(SystemExit, match="choose among plan, capped"):
        rehearsal_cells.cells_of("some")


def test_rehearsal_tables_name_worst_and_failed(tmp_path: Path) -> None:
    first, second, *_ = rehearsal_cells.cells_of("plan")
    cells = [done(first), done(second, memory_error=-0.2), rehearsal_cells.cells_of("plan")[2] | {"outcome": "failed"}]
    table = rehearsal_page.plan_table(cells)
    assert "| Llama-3.2-1B | 1 | 32K | 10.00 | 11.00 | +10.0% | 10.00 | 11.00 | +10.0% | derived |" in table
    assert "Worst of 2, memory error: -20.0% (Llama-3.2-1B, sp=1, 128K)." in table
    assert "| Llama-3.2-1B | 4 | 128K | failed |" in table
    rehearsal_page.plot(cells, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_rehearsal_page_shows_efficiency_and_published_figures() -> None:
    scaling = [done(c, step_s=s) for c, s in zip(rehearsal_cells.cells_of("scaling"), (16.0, 8.0, 5.0), strict=False)]
    table = rehearsal_page.scaling_table(scaling)
    assert "| 2 | 8.00 | 10.00 | 0.50 (predicted, NVLink 4, 450 GB/s) | 16,384 | 100.0% |" in table
    assert "| 80.0% |" in table
    assert "| 8K | 12.00 | 23.4 |" in rehearsal_page.capped_table([done(rehearsal_cells.cells_of("capped")[0])])


def test_rehearsals_equal_cells_of_two_groups_run_once(tmp_path: Path) -> None:
    [planned] = [c for c in rehearsal_cells.cells_of("plan") if (c["model"], c["sp"]) == ("Qwen/Qwen3-4B", 4)]
    scaling = [c for c in rehearsal_cells.cells_of("scaling") if c["sp"] == 4]
    result: dict[str, Any] = {"runs": [], "cells": [done(planned)]}
    arguments = argparse.Namespace(again=False, total=600.0, limit=600.0, extra="", file=tmp_path / "all.json")
    with patch.object(rehearsals, "run_cell") as run:
        rehearsals.run_all(scaling, result, arguments, rehearsers=None)  # type: ignore[arg-type]
    run.assert_not_called()
    assert [c["group"] for c in result["cells"]] == ["plan", "scaling"]
    assert result["cells"][1] == rehearsal_plan.planned_anew(result["cells"][0] | {"group": "scaling"})
    assert result["runs"][0].keys() >= {"command", "python", "torch", "transformers"}


def test_rehearsals_config_of_experts_loads(tmp_path: Path) -> None:
    from ithaca.models.files.pretrained import read_config

    config = read_config(rehearsals.write_experts(tmp_path))
    assert (config.model_type, config.num_hidden_layers, config.num_experts) == ("qwen3_moe", 6, 128)


@pytest.mark.slow
def test_rehearsals_cells_of_one_sort_run_in_one_process(tmp_path: Path) -> None:
    of = rehearsal_cells.cell("plan", "embedded", 2, "1K", "precision=fp32")
    with closing(rehearsals.Rehearsers()) as rehearsers:
        got = rehearsals.run_cell(of, 300, [], rehearsers)
        assert got["outcome"] == "done", got.get("error")
        assert got["derived"] is False
        assert json.dumps(got)
        process = rehearsers.now.process
        longer = rehearsals.run_cell(of | {"length": 2048}, 300, [], rehearsers)
        assert rehearsers.now.process is process
        assert (longer["outcome"], longer["length"]) == ("done", 2048)
        assert longer["peak"] > got["peak"]
        again = rehearsals.run_cell(of, 300, [], rehearsers)
        assert again | {"spent_s": 0.0} == got | {"spent_s": 0.0}
        other = rehearsals.run_cell(of | {"settings": ["precision=bf16", "mesh.sp=2"]}, 300, [], rehearsers)
        assert other["outcome"] == "done"
        assert rehearsers.now.process is not process
        short = rehearsals.run_cell(of, 0.5, [], rehearsers)
        assert short["outcome"] == "over the limit"
        wrong = rehearsals.run_cell(of | {"settings": ["mesh.sq=2"]}, 300, [], rehearsers)
    assert wrong["outcome"] == "failed"
    assert "unknown key 'sq' in mesh" in wrong["error"]


def test_rehearsals_cell_planned_otherwise_runs_again(tmp_path: Path) -> None:
    [of] = [c for c in rehearsal_cells.cells_of("plan") if (c["model"], c["sp"]) == ("Qwen/Qwen3-4B", 4)]
    before = done(of)
    assert rehearsal_plan.planned_anew(before)["planned_so_today"]
    before["predicted"]["budgets"][0] = int(5e10)
    result: dict[str, Any] = {"runs": [], "cells": [rehearsal_plan.planned_anew(before)]}
    assert not result["cells"][0]["planned_so_today"]
    arguments = argparse.Namespace(again=False, total=600.0, limit=600.0, extra="", file=tmp_path / "all.json")
    with patch.object(rehearsals, "run_cell", return_value=done(of)) as run:
        rehearsals.run_all([of], result, arguments, rehearsers=None)  # type: ignore[arg-type]
    run.assert_called_once()
    assert result["cells"][0]["planned_so_today"]


def test_plan_agrees_with_committed_rehearsals() -> None:
    """Every figure of the plan's is today's: a change of the planning that goes wrong is seen here, without a GPU."""
    cells = json.loads((ROOT / "benchmarks/results/rehearsals.json").read_text())["cells"]
    planned = {rehearsal_cells.key(c): c for c in cells if c["group"] == "plan"}
    assert planned.keys() == {rehearsal_cells.key(c) for c in rehearsal_cells.cells_of("plan")}
    for c in planned.values():
        today = rehearsal_plan.planned_anew(c)
        assert c == today, "run `python -m benchmarks.rehearsals benchmarks/results/rehearsals.json`"
        assert abs(today["memory_error"]) <= PLANNED_MEMORY, rehearsal_cells.name_of(c)
        assert abs(today["time_error"]) <= PREDICTED_STEP, rehearsal_cells.name_of(c)


def test_plan_host_bound_steps_agree_with_committed_rehearsals() -> None:
    """All states on the host, from 8K tokens, where launching takes most of a step, to a million."""
    cells = json.loads((ROOT / "benchmarks/results/rehearsals.json").read_text())["cells"]
    for c in (c for c in cells if "memory.on_host=everything" in c["settings"]):
        assert abs(rehearsal_plan.planned_anew(c)["time_error"]) <= PREDICTED_STEP, rehearsal_cells.name_of(c)


def test_committed_rehearsals_hold_capped_card_and_million_tokens() -> None:
    cells = json.loads((ROOT / "benchmarks/results/rehearsals.json").read_text())["cells"]
    capped = {show_length(c["length"]): c for c in cells if c["group"] == "capped"}
    for length, limit in {"8K": 12, "32K": 15, "64K": 18, "96K": 20, "1M": 80}.items():
        assert capped[length]["reserved"] <= limit * 1e9
        assert "--cap" in capped[length]["options"]
    [whole] = [c for c in cells if c["group"] == "whole"]
    assert (whole["sp"], whole["length"], whole["derived"]) == (8, 1_048_576, False)
    assert whole["step_s"] < 300
    assert whole["reserved"] < 40e9
