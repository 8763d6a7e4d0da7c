"""A disk that fills up while a checkpoint is written: the run goes on, and what was saved before is whole."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ithaca.config.schema import RunSettings
from ithaca.state.checkpoint.manifest import PINNED
from ithaca.training.run.disk_space import Room
from ithaca.training.run.progress import Place
from tests.ranks import RankError, run_ranks
from tests.training.runs import losses, run_train, small_run


def _with_full_disk(text: str, full: list[int]) -> dict[str, Any]:
    """Writing the checkpoints of the steps in `full` fails on rank 1 as the operating system would have it."""
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


def test_too_little_disk_is_told_before_the_first_step(tmp_path: Path) -> None:
    """Little is less than all that the run will have written, its last model among it."""
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
    ("place", "there", "expected"),
    [
        (Place(), [], Room(2, 2)),
        (Place(0, 5, 5), ["step-00000005"], Room(1, 2)),
        (Place(0, 10, 10), ["step-00000005", "step-00000010"], Room(0, 2)),
        (Place(1, 0, 12), ["step-00000005", "step-00000010", "step-00000012!"], Room(0, 1)),
        (Place(1, 4, 16), ["step-00000012!"], Room(0, 1)),
        (Place(2, 0, 19), ["step-00000012!", "step-00000019!"], Room(0, 0)),
    ],
)
def test_what_is_there_is_not_counted_again(tmp_path: Path, place: Place, there: list[str], expected: Room) -> None:
    """Stages of 12 and 7 steps, saved at 5, 10 and 15; a name with a ! is a stage's end."""
    stages = [{"length": 64, "steps": 12, "batch": 4}, {"length": 64, "steps": 7, "batch": 4}]
    run = small_run(tmp_path, "run", stages=stages)
    for name in there:
        (tmp_path / name.rstrip("!")).mkdir()
        if name.endswith("!"):
            (tmp_path / name.rstrip("!") / PINNED).touch()
    assert Room.of(run, place, tmp_path) == expected


def _with_full_export(text: str) -> None:
    from ithaca.training import trainer

    real = trainer.export_checkpoint

    def write(checkpoint: Path, to: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        trainer.export_checkpoint = write  # type: ignore[assignment]
        trainer.train(RunSettings.model_validate_json(text))
    finally:
        trainer.export_checkpoint = real


def test_a_model_that_could_not_be_written_is_written_by_the_same_command(tmp_path: Path) -> None:
    run = small_run(tmp_path, "run", stages=[{"length": 64, "steps": 2, "batch": 4}])
    with pytest.raises(
        RankError, match=r"1-64 was not written \(.*No space left.*step-00000002.*make room, and the same"
    ):
        run_ranks(2, _with_full_export, run.model_dump_json())
    again = run_train(2, run)
    assert again["finished"]
    assert again["sum"] is not None
