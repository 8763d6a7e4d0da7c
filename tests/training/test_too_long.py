"""A later stage that does not fit is refused before the first step, with settings to type after `ithaca train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankError
from tests.training.runs import run_train, small_run


@pytest.mark.parametrize(
    ("length", "own", "sp", "typed"),
    [(16_384, None, 2, "launch.processes=4 mesh.sp=4"), (12_288, 1, 1, "stages.1.sp=2")],
    ids=["the run's degree", "its own"],
)
def test_later_stage_that_does_not_fit_is_refused_before_first_step(
    tmp_path: Path, length: int, own: int | None, sp: int, typed: str
) -> None:
    stages: list[dict[str, Any]] = [
        {"length": 64, "steps": 2, "batch": 2},
        {"length": length, "steps": 1, "batch": 2, "sp": own, "rope": {"kind": "yarn", "factor": length / 64}},
    ]
    run = small_run(tmp_path, "long", stages=stages, memory={"budget": "20MB"})
    with pytest.raises(RankError, match=rf"{length:,} tokens over sp={sp} do not fit") as raised:
        run_train(2, run)
    fits = str(raised.value).partition("any one of these fits: ")[2]
    assert fits.startswith(f"{typed}; stages.1.length="), fits
    assert not list((tmp_path / "long" / "checkpoints").glob("step-*"))
