"""Full disks: the run goes on without a checkpoint, and the checkpoints before stay whole."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ithaca.config.schema import RunSettings
from ithaca.state.checkpoint.manifest import PINNED
from ithaca.training.run.disk_space import PendingWrites
from ithaca.training.run.progress import RunProgress
from tests.ranks import RankError, run_ranks
from tests.training.runs import losses, run_train, small_run


def _with_full_disk(text: str, full: list[int]) -> dict[str, Any]:
    """Train while the checkpoints of the steps in `full` fail on rank 1 with the operating system's error."""
    from ithaca.state.checkpoint import checkpoints
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
def test_full_disk_keeps_run_and_last_checkpoint(tmp_path: Path, background: bool) -> None:
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
def test_full_disk_at_stage_end_ends_run_with_last_checkpoint(tmp_path: Path) -> None:
    run = small_run(tmp_path, "ended", checkpoints={"save_every": 5})
    with pytest.raises(RankError, match=r"step 12 was not written.*No space left on device"):
        run_ranks(2, _with_full_disk, run.model_dump_json(), [12])
    whole = run_train(2, small_run(tmp_path, "whole"))
    again = run_train(2, small_run(tmp_path, "ended"))
    assert again["finished"]
    assert again["sum"] == whole["sum"]


def _little_disk(text: str, free: int) -> None:
    from ithaca.state.checkpoint import checkpoints
    from ithaca.training.trainer import train

    real = checkpoints.shutil.disk_usage
    try:
        checkpoints.shutil.disk_usage = lambda _: SimpleNamespace(free=free)  # type: ignore[assignment]
        train(RunSettings.model_validate_json(text))
    finally:
        checkpoints.shutil.disk_usage = real


def _size(*paths: Path) -> int:
    return sum(file.stat().st_size for path in paths for file in path.rglob("*") if file.is_file())


def test_too_little_disk_is_refused_before_first_step(tmp_path: Path) -> None:
    """Try sizes below the sum of all checkpoints and models, and one above."""
    whole = small_run(tmp_path, "whole")
    assert run_train(1, whole)["finished"]
    checkpoints, models = Path(whole.output) / "checkpoints", Path(whole.output) / "stages"
    run = small_run(tmp_path, "little")
    for free in (1000, _size(checkpoints), _size(checkpoints) + _size(models) // 2):
        with pytest.raises(
            RankError, match=r"3 checkpoints of .* and 1 model of .* free: make room.*checkpoints\.keep=1$"
        ):
            run_ranks(1, _little_disk, run.model_dump_json(), free)
        assert not (Path(run.output) / "metrics.jsonl").exists()
    run_ranks(1, _little_disk, run.model_dump_json(), int(1.05 * _size(checkpoints, models)))
    assert (Path(run.output) / "export").exists()


@pytest.mark.parametrize(
    ("progress", "there", "expected"),
    [
        (RunProgress(), [], PendingWrites(2, 2)),
        (RunProgress(0, 5, 5), ["step-00000005"], PendingWrites(1, 2)),
        (RunProgress(0, 10, 10), ["step-00000005", "step-00000010"], PendingWrites(0, 2)),
        (RunProgress(1, 0, 12), ["step-00000005", "step-00000010", "step-00000012!"], PendingWrites(0, 1)),
        (RunProgress(1, 4, 16), ["step-00000012!"], PendingWrites(0, 1)),
        (RunProgress(2, 0, 19), ["step-00000012!", "step-00000019!"], PendingWrites(0, 0)),
    ],
)
def test_pending_writes_leave_out_written_files(
    tmp_path: Path, progress: RunProgress, there: list[str], expected: PendingWrites
) -> None:
    """Count over stages of 12 and 7 steps, saved at 5, 10 and 15; a name with a ! is a stage's end."""
    stages = [{"length": 64, "steps": 12, "batch": 4}, {"length": 64, "steps": 7, "batch": 4}]
    run = small_run(tmp_path, "run", stages=stages)
    for name in there:
        (tmp_path / name.rstrip("!")).mkdir()
        if name.endswith("!"):
            (tmp_path / name.rstrip("!") / PINNED).touch()
    assert PendingWrites.of(run, progress, tmp_path) == expected


def _with_full_export(text: str) -> None:
    from ithaca.training import saving
    from ithaca.training.trainer import train

    real = saving.export_checkpoint

    def write(checkpoint: Path, to: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        saving.export_checkpoint = write  # type: ignore[assignment]
        train(RunSettings.model_validate_json(text))
    finally:
        saving.export_checkpoint = real


def test_unwritten_model_is_written_by_next_start(tmp_path: Path) -> None:
    run = small_run(tmp_path, "run", stages=[{"length": 64, "steps": 2, "batch": 4}])
    with pytest.raises(
        RankError, match=r"1-64 was not written \(.*No space left.*step-00000002.*make room, and the same"
    ):
        run_ranks(2, _with_full_export, run.model_dump_json())
    again = run_train(2, run)
    assert again["finished"]
    assert again["sum"] is not None
