"""The run's folder: its settings on disk, the changes that a resumed run may make, and the degrees of its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ithaca.config.schema import RunSettings, StageSettings, load_run, read_run
from ithaca.errors import ConfigError, MeshError
from ithaca.training.degrees import StageDegrees
from ithaca.training.run.changed_settings import describe_rate_changes, refused_changes, resumed_progress
from ithaca.training.run.progress import RunProgress
from ithaca.training.run.run_folder import RunFolder


def held(folder: Path, run: RunSettings, *, steps: bool = True) -> RunFolder:
    """Make a folder with a run's settings and, if `steps`, a checkpoint."""
    found = RunFolder(folder)
    (found.checkpoints / ("step-00000005" if steps else ".step-00000005.part")).mkdir(parents=True)
    found.write_settings(run)
    return found


def test_setting_before_first_checkpoint_may_change(tmp_path: Path) -> None:
    wrong, right = load_run(None, ["data.sources=mistyped"]), load_run(None, ["data.sources=texts"])
    held(tmp_path / "early", wrong, steps=False).refuse_another(right)
    with pytest.raises(
        ConfigError, match=r"data\.sources was .*mistyped.*, is .*texts.*second run with output=.*/second$"
    ):
        held(tmp_path / "late", wrong).refuse_another(right)


@pytest.mark.parametrize("content", ["", "seed: [", "sede: 3\n"])
def test_unreadable_settings_are_named(tmp_path: Path, content: str) -> None:
    folder = held(tmp_path, RunSettings(seed=4))
    folder.settings.write_text(content)
    with pytest.raises(ConfigError, match="remove it to go on"):
        folder.refuse_another(RunSettings(seed=4))


def test_killed_write_leaves_old_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = held(tmp_path, RunSettings(seed=4))

    write = Path.write_bytes

    def cut_short(path: Path, data: bytes) -> None:
        write(path, data[:10])
        raise OSError("killed")

    monkeypatch.setattr(Path, "write_bytes", cut_short)
    with pytest.raises(OSError, match="killed"):
        folder.write_settings(RunSettings(seed=4))
    assert load_run(folder.settings) == RunSettings(seed=4)


def other(**more: Any) -> RunSettings:
    stage = {"length": 64, "steps": 5, "lr": 1e-3} | more.pop("stage", {})
    return read_run({"stages": [stage], **more})


@pytest.mark.parametrize(
    "more",
    [
        {"data": {"workers": 2, "cache": "elsewhere", "bad_share": 0.5}},
        {"validation": {"every": 3, "rows": 2, "sources": ["held.jsonl"]}},
        {"mesh": {"sp": 2}, "launch": {"processes": 2}},
        {"stage": {"sp": 2, "lr": 1e-4, "schedule": "linear", "warmup": 0.2, "final": 0.0}},
    ],
)
def test_change_of_how_a_run_runs_is_allowed(more: dict[str, Any]) -> None:
    assert refused_changes(other(), other(**more), begun=1) == []


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"validation": {"share": 0.2}}, "validation.share"),
        ({"data": {"rows": "joined"}}, "data.rows"),
        ({"lora": {"rank": 4}}, "lora"),
        ({"optimizer": {"weight_decay": 0.1}}, "optimizer.weight_decay"),
        ({"stage": {"batch": 2}}, "stages.0.batch"),
    ],
)
def test_change_of_what_a_run_learns_is_refused(more: dict[str, Any], named: str) -> None:
    assert [change.name for change in refused_changes(other(), other(**more), begun=1)] == [named]


def test_refusal_names_all_changes_with_both_values(tmp_path: Path) -> None:
    folder = held(tmp_path, other())
    changed = other(seed=5, data={"rows": "joined"}, stage={"batch": 2, "length": 128, "lr": 1e-4})
    with pytest.raises(ConfigError) as refusal:
        folder.refuse_another(changed, RunProgress(0, 3, 3))
    said = str(refusal.value)
    for each in ("seed was 0, is 5", "data.rows was packed, is joined", "stages.0.batch was 1, is 2",
                 "stages.0.length was 64, is 128", "put them back, or begin a second run with output="):  # fmt: skip
        assert each in said
    assert "lr" not in said


def test_stage_not_begun_may_change() -> None:
    later = {"length": 128, "steps": 5}
    before, now = (
        other().model_copy(update={"stages": [*other().stages, StageSettings(**later | more)]})
        for more in ({}, {"batch": 4})
    )
    assert refused_changes(before, now, begun=1) == []
    assert [str(change) for change in refused_changes(before, now, begun=2)] == ["stages.1.batch was 1, is 4"]
    assert refused_changes(other(), now, begun=1) == []


def test_changed_rate_warns_with_values_and_next_rates() -> None:
    (warning,) = describe_rate_changes(other(), other(stage={"lr": 1e-4, "sp": 2}), RunProgress(0, 3, 3))
    assert warning.startswith(
        "stages.0.lr was 0.001, is 0.0001; stage 1 goes on with the cosine schedule of all its steps: "
    )
    assert "above" not in warning
    # A cosine at its end rises again when the stage gets more steps.
    (warning,) = describe_rate_changes(other(), other(stage={"steps": 50}), RunProgress(0, 5, 5))
    assert warning.startswith("stages.0.steps was 5, is 50; ")
    assert "at step 6 to " in warning
    assert warning.endswith("at step 50, above the rate before it")
    assert describe_rate_changes(other(), other(seed=4), RunProgress(0, 3, 3)) == []


def ended(progress: RunProgress) -> list[int] | None:
    """Return the steps of the ended stages, where the first stage takes five and the next ones seven."""
    return [5, 7][: progress.stage]


def staged(*counts: int) -> RunSettings:
    return read_run({"stages": [{"length": 64, "steps": count} for count in counts]})


@pytest.mark.parametrize(
    ("progress", "counts", "expected"),
    [
        (RunProgress(), (3,), RunProgress()),
        (RunProgress(0, 4, 4), (9,), RunProgress(0, 4, 4)),
        (RunProgress(0, 4, 4), (4,), RunProgress(0, 4, 4)),
        (RunProgress(1, 0, 5), (5,), RunProgress(1, 0, 5)),
        (RunProgress(1, 0, 5), (8,), RunProgress(0, 5, 5, taken=1)),
        (RunProgress(1, 0, 5), (5, 7), RunProgress(1, 0, 5)),
        (RunProgress(1, 0, 5), (8, 7), RunProgress(0, 5, 5, taken=1)),
        (RunProgress(2, 0, 12), (5, 9), RunProgress(1, 7, 12, taken=1)),
        (RunProgress(1, 2, 7), (5, 3), RunProgress(1, 2, 7)),
    ],
)
def test_stage_may_grow_until_next_stage_begins(
    progress: RunProgress, counts: tuple[int, ...], expected: RunProgress
) -> None:
    assert resumed_progress(progress, staged(*counts), ended(progress)) == expected


@pytest.mark.parametrize(
    ("progress", "counts", "said"),
    [
        (
            RunProgress(0, 4, 4),
            (3,),
            r"stages\.0 has taken 4 steps and 3 are asked for.*use stages\.0\.steps=4 or more",
        ),
        (RunProgress(1, 0, 5), (4,), r"stages\.0 has taken 5 steps and 4"),
        (
            RunProgress(1, 2, 7),
            (6, 9),
            r"stages\.0 took 5 steps before stages\.1 began, and 6 are asked.*use stages\.0\.steps=5",
        ),
        (RunProgress(1, 2, 7), (4, 9), r"took 5 steps before stages\.1 began, and 4"),
        (RunProgress(2, 0, 12), (6, 7), r"stages\.0 took 5 steps before stages\.1 began, and 6"),
        (RunProgress(2, 0, 12), (5, 6), r"stages\.1 has taken 7 steps and 6"),
        (RunProgress(1, 2, 7), (5,), r"stages has 1, and this run has begun 2: put stages\.1 back"),
        (RunProgress(2, 0, 12), (9,), r"stages has 1, and this run has begun 2"),
    ],
)
def test_fewer_steps_than_taken_are_refused(progress: RunProgress, counts: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resumed_progress(progress, staged(*counts), ended(progress))


def test_checkpoint_without_counts_resumes_at_its_steps() -> None:
    for progress, counts, expected in (
        (RunProgress(1, 0, 5), (5,), RunProgress(1, 0, 5)),
        (RunProgress(1, 0, 5), (8,), RunProgress(0, 5, 5, taken=1)),
        (RunProgress(2, 0, 12), (5, 7), RunProgress(2, 0, 12)),
        (RunProgress(1, 3, 8), (5, 7), RunProgress(1, 3, 8)),
        (RunProgress(0, 3, 3), (5, 7), RunProgress(0, 3, 3)),
    ):
        assert resumed_progress(progress, staged(*counts)) == expected


def degree(world: int, batch: int, sp: int, heads: int) -> int:
    run = other(stage={"batch": batch}, mesh={"sp": sp})
    return StageDegrees(run.mesh, run.stages, world, heads).sp(0)


@pytest.mark.parametrize(("world", "sp", "batch", "advice"), [(2, 1, 3, 2), (4, 1, 2, 2), (4, 1, 3, 4), (8, 2, 6, 4)])
def test_advised_degree_fits(world: int, sp: int, batch: int, advice: int) -> None:
    with pytest.raises(MeshError, match=f"mesh.sp={advice}$"):
        degree(world, batch, sp, heads=8)
    assert degree(world, batch, advice, heads=8) == advice


def test_advised_degree_is_at_most_the_heads() -> None:
    with pytest.raises(MeshError, match=r"use stages\.0\.batch=4, or mesh\.sp=2$"):
        degree(4, 2, 1, heads=2)
    with pytest.raises(MeshError, match=r"use stages\.0\.batch=2, or 2 ranks$"):
        degree(4, 1, 2, heads=2)
