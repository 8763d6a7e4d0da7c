"""A disk that fills up while a checkpoint is written: the run goes on, and what was saved before is whole."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ithaca.config import Run
from tests.ranks import RankError, run_ranks
from tests.training.runs import losses, run_train, small_run


def _with_full_disk(text: str, full: list[int]) -> dict[str, Any]:
    """Writing the checkpoints of the steps in `full` fails on rank 1 as the operating system would have it."""
    from ithaca.state import checkpoints
    from tests.training.runs import _train

    real = checkpoints.write_tensors

    def write(folder: Path, tensors: Any, group: Any) -> Any:
        files = real(folder, tensors, group)
        if any(f"{step:08d}" in folder.name for step in full) and group.rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return files

    try:
        checkpoints.write_tensors = write
        return _train(text)
    finally:
        checkpoints.write_tensors = real


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_the_run_goes_on_and_the_last_checkpoint_stands(tmp_path: Path, background: bool) -> None:
    settings = {"save_every": 3, "background": background}
    whole = run_train(2, small_run(tmp_path, "whole", checkpoints=settings))
    run = small_run(tmp_path, "full", checkpoints=settings)
    got = run_ranks(2, _with_full_disk, run.model_dump_json(), [6, 9])[0]
    assert got["finished"]
    assert losses(got) == losses(whole)
    assert got["sum"] == whole["sum"]
    kept = sorted(path.name for path in (Path(run.output) / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000012"]


@pytest.mark.slow
def test_a_stage_that_cannot_be_saved_ends_the_run_with_the_last_one_whole(tmp_path: Path) -> None:
    run = small_run(tmp_path, "ended", checkpoints={"save_every": 5})
    with pytest.raises(RankError, match=r"step 12 was not written.*No space left on device"):
        run_ranks(2, _with_full_disk, run.model_dump_json(), [12])
    whole = run_train(2, small_run(tmp_path, "whole"))
    again = run_train(2, small_run(tmp_path, "ended"))
    assert again["finished"]
    assert again["sum"] == whole["sum"]


def _little_disk(text: str, free: int) -> None:
    from ithaca.state import checkpoints
    from ithaca.training.trainer import train

    real = checkpoints.shutil.disk_usage
    try:
        checkpoints.shutil.disk_usage = lambda _: SimpleNamespace(free=free)  # type: ignore[assignment]
        train(Run.model_validate_json(text))
    finally:
        checkpoints.shutil.disk_usage = real


def test_too_little_disk_is_told_before_the_first_step(tmp_path: Path) -> None:
    run = small_run(tmp_path, "little")
    with pytest.raises(RankError, match=r"a checkpoint needs 0\.00 GiB and .* has 0\.00 GiB free: make room"):
        run_ranks(2, _little_disk, run.model_dump_json(), 1000)
    assert not (Path(run.output) / "metrics.jsonl").exists()
