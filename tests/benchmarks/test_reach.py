"""`benchmarks.reach`: the search finds where memory ends, and both halves of a cell run on the CPU."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks import reach
from benchmarks.step import load


@pytest.mark.parametrize("end", [0, 2047, 2048, 9000, 50_000, 333_333, 2**20])
def test_reach_search_ends_within_a_sixteenth(end: int) -> None:
    tried: list[int] = []
    found = reach.longest_that(lambda tokens: tried.append(tokens) or tokens <= end, 2**20)  # type: ignore[func-returns-value]
    assert found <= end
    assert end - found <= max(2 * reach.UNIT, end // 15)
    assert len(tried) <= 16


def test_reach_out_of_memory_is_not_the_longest() -> None:
    checkpointed = reach.checkpointed_step

    def limited(model: torch.nn.Module) -> reach.Callable[[torch.Tensor], torch.Tensor]:
        step = checkpointed(model)

        def run(ids: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] > 3000:
                raise torch.OutOfMemoryError("out of memory")
            return step(ids)

        return run

    with patch.object(reach, "checkpointed_step", limited), patch.object(reach, "MOST", 4096):
        found = reach.plain("tiny", 1.0, "cpu")
    assert found["tokens"] == 2048
    assert found["seconds"] > 0


def test_reach_committed_cells_fit_three_quarters_of_card() -> None:
    own = reach.longer("tiny", 1.0, 256, "cpu")
    assert own["outcome"] == "done"
    assert own["tokens"] == 256
    assert own["plan"].startswith("2 keep")


def test_reach_cell_is_saved_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, halves = tmp_path / "reach.json", [{"tokens": 2048, "seconds": 1.0, "machine": {"device": "one"}}]
    halves.append({"outcome": "done", "tokens": 8192, "seconds": 2.0, "allocated_gib": 0.5, "plan": "2 keep"})
    for _ in range(2):
        given = iter([dict(half) for half in halves])
        arguments = ["reach", str(file), "--cells", "tiny:0.5", "--device", "cpu"]
        with patch("sys.argv", arguments), patch.object(reach, "apart", lambda *_, given=given: next(given)):
            reach.main()
    assert len(load(file)["cells"]) == 1
    assert "| tiny | 0.5 GiB | 2,048 | 1.0 s | 8,192 | 2.0 s, 0.5 GiB | 2 keep |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="write model:GiB"):
        reach.parse("tiny")
