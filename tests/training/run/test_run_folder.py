"""The run's folder: what counts as a run that is there, what may change in it, and how its settings are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ithaca.config.schema import RunSettings, StageSettings, load_run, read_run
from ithaca.errors import ConfigError, MeshError
from ithaca.training.degrees import choose_sp
from ithaca.training.run.changed_settings import advise_changes, refused, settle_place
from ithaca.training.run.progress import Place
from ithaca.training.run.run_folder import RunFolder


def held(folder: Path, run: RunSettings, *, steps: bool = True) -> RunFolder:
    """A folder with a run's settings and, if `steps`, a checkpoint."""
    found = RunFolder(folder)
    (found.checkpoints / ("step-00000005" if steps else ".step-00000005.part")).mkdir(parents=True)
    found.leave_settings(run)
    return found


def test_a_mistake_before_the_first_checkpoint_may_be_put_right(tmp_path: Path) -> None:
    wrong, right = load_run(None, ["data.sources=mistyped"]), load_run(None, ["data.sources=texts"])
    held(tmp_path / "early", wrong, steps=False).refuse_another(right)
    with pytest.raises(ConfigError, match=r"data\.sources was .*mistyped.*, is .*texts.*set output="):
        held(tmp_path / "late", wrong).refuse_another(right)


@pytest.mark.parametrize("content", ["", "seed: [", "sede: 3\n"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, content: str) -> None:
    folder = held(tmp_path, RunSettings(seed=4))
    folder.settings.write_text(content)
    with pytest.raises(ConfigError, match="remove it to go on"):
        folder.refuse_another(RunSettings(seed=4))


def test_settings_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = held(tmp_path, RunSettings(seed=4))

    write = Path.write_bytes

    def cut_short(path: Path, data: bytes) -> None:
        write(path, data[:10])
        raise OSError("killed")

    monkeypatch.setattr(Path, "write_bytes", cut_short)
    with pytest.raises(OSError, match="killed"):
        folder.leave_settings(RunSettings(seed=4))
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
def test_how_a_run_runs_may_change(more: dict[str, Any]) -> None:
    assert refused(other(), other(**more), begun=1) == []


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
def test_what_it_learns_may_not(more: dict[str, Any], named: str) -> None:
    assert [change.name for change in refused(other(), other(**more), begun=1)] == [named]


def test_all_settings_that_differ_are_named_with_both_values(tmp_path: Path) -> None:
    folder = held(tmp_path, other())
    changed = other(seed=5, data={"rows": "joined"}, stage={"batch": 2, "length": 128, "lr": 1e-4})
    with pytest.raises(ConfigError) as refusal:
        folder.refuse_another(changed, Place(0, 3, 3))
    said = str(refusal.value)
    for each in ("seed was 0, is 5", "data.rows was packed, is joined", "stages.0.batch was 1, is 2",
                 "stages.0.length was 64, is 128", "put them back, or set output="):  # fmt: skip
        assert each in said
    assert "lr" not in said


def test_a_stage_that_has_not_begun_may_become_another() -> None:
    later = {"length": 128, "steps": 5}
    before, now = (
        other().model_copy(update={"stages": [*other().stages, StageSettings(**later | more)]})
        for more in ({}, {"batch": 4})
    )
    assert refused(before, now, begun=1) == []
    assert [str(change) for change in refused(before, now, begun=2)] == ["stages.1.batch was 1, is 4"]
    assert refused(other(), now, begun=1) == []


def test_a_new_rate_is_told_with_both_values_and_its_course() -> None:
    (told,) = advise_changes(other(), other(stage={"lr": 1e-4, "sp": 2}), Place(0, 3, 3))
    assert told.startswith(
        "stages.0.lr was 0.001, is 0.0001; stage 1 goes on with the cosine schedule of all its steps: "
    )
    assert "above" not in told
    # A cosine that had fallen to its end rises where it is drawn out.
    (told,) = advise_changes(other(), other(stage={"steps": 50}), Place(0, 5, 5))
    assert told.startswith("stages.0.steps was 5, is 50; ")
    assert "at step 6 to " in told
    assert told.endswith("at step 50, above the rate before it")
    assert advise_changes(other(), other(seed=4), Place(0, 3, 3)) == []


def ended(place: Place) -> list[int] | None:
    """The steps of the stages that had ended, where a stage takes five and the next ones seven."""
    return [5, 7][: place.stage]


def staged(*counts: int) -> RunSettings:
    return read_run({"stages": [{"length": 64, "steps": count} for count in counts]})


@pytest.mark.parametrize(
    ("place", "counts", "expected"),
    [
        (Place(), (3,), Place()),
        (Place(0, 4, 4), (9,), Place(0, 4, 4)),
        (Place(0, 4, 4), (4,), Place(0, 4, 4)),
        (Place(1, 0, 5), (5,), Place(1, 0, 5)),
        (Place(1, 0, 5), (8,), Place(0, 5, 5, taken=1)),
        (Place(1, 0, 5), (5, 7), Place(1, 0, 5)),
        (Place(1, 0, 5), (8, 7), Place(0, 5, 5, taken=1)),
        (Place(2, 0, 12), (5, 9), Place(1, 7, 12, taken=1)),
        (Place(1, 2, 7), (5, 3), Place(1, 2, 7)),
    ],
)
def test_a_stage_may_grow_until_the_next_one_has_begun(place: Place, counts: tuple[int, ...], expected: Place) -> None:
    assert settle_place(place, staged(*counts), ended(place)) == expected


@pytest.mark.parametrize(
    ("place", "counts", "said"),
    [
        (Place(0, 4, 4), (3,), r"stages\.0 has taken 4 steps and 3 are asked for.*use stages\.0\.steps=4 or more"),
        (Place(1, 0, 5), (4,), r"stages\.0 has taken 5 steps and 4"),
        (
            Place(1, 2, 7),
            (6, 9),
            r"stages\.0 took 5 steps before stages\.1 began, and 6 are asked.*use stages\.0\.steps=5",
        ),
        (Place(1, 2, 7), (4, 9), r"took 5 steps before stages\.1 began, and 4"),
        (Place(2, 0, 12), (6, 7), r"stages\.0 took 5 steps before stages\.1 began, and 6"),
        (Place(2, 0, 12), (5, 6), r"stages\.1 has taken 7 steps and 6"),
        (Place(1, 2, 7), (5,), r"stages has 1, and this run has begun 2: put stages\.1 back"),
        (Place(2, 0, 12), (9,), r"stages has 1, and this run has begun 2"),
    ],
)
def test_steps_that_were_taken_stay(place: Place, counts: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settle_place(place, staged(*counts), ended(place))


def test_a_checkpoint_of_an_earlier_version_stands_where_its_steps_say() -> None:
    for place, counts, expected in (
        (Place(1, 0, 5), (5,), Place(1, 0, 5)),
        (Place(1, 0, 5), (8,), Place(0, 5, 5, taken=1)),
        (Place(2, 0, 12), (5, 7), Place(2, 0, 12)),
        (Place(1, 3, 8), (5, 7), Place(1, 3, 8)),
        (Place(0, 3, 3), (5, 7), Place(0, 3, 3)),
    ):
        assert settle_place(place, staged(*counts)) == expected


class Heads:
    num_attention_heads = 8


class FewHeads:
    num_attention_heads = 2


@pytest.mark.parametrize(("world", "sp", "batch", "advice"), [(2, 1, 3, 2), (4, 1, 2, 2), (4, 1, 3, 4), (8, 2, 6, 4)])
def test_the_degree_advised_is_one_that_goes(world: int, sp: int, batch: int, advice: int) -> None:
    run = other(stage={"batch": batch}, mesh={"sp": sp})
    with pytest.raises(MeshError, match=f"mesh.sp={advice}$"):
        choose_sp(run, 0, world, Heads())
    assert choose_sp(other(stage={"batch": batch}, mesh={"sp": advice}), 0, world, Heads()) == advice


def test_no_degree_above_the_heads_is_advised() -> None:
    with pytest.raises(MeshError, match=r"use stages\.0\.batch=4, or mesh\.sp=2$"):
        choose_sp(other(stage={"batch": 2}, mesh={"sp": 1}), 0, 4, FewHeads())
    with pytest.raises(MeshError, match=r"use stages\.0\.batch=2, or 2 ranks$"):
        choose_sp(other(stage={"batch": 1}, mesh={"sp": 2}), 0, 4, FewHeads())
