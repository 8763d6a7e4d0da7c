"""The run's folder: what counts as a run that is there, what may change in it, and how its settings are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ithaca.config import Run, load_run, read_run
from ithaca.errors import ConfigError, MeshError
from ithaca.training.folder import RunFolder, difference
from ithaca.training.session import choose_sp


def held(folder: Path, run: Run, *, steps: bool = True) -> RunFolder:
    """A folder with a run's settings and, if `steps`, a checkpoint."""
    found = RunFolder(folder)
    (found.checkpoints / ("step-00000005" if steps else ".step-00000005.part")).mkdir(parents=True)
    found.leave_settings(run)
    return found


def test_a_mistake_before_the_first_checkpoint_may_be_put_right(tmp_path: Path) -> None:
    wrong, right = load_run(None, ["data.sources=mistyped"]), load_run(None, ["data.sources=texts"])
    held(tmp_path / "early", wrong, steps=False).refuse_another(right)
    with pytest.raises(ConfigError, match=r"holds a run with another data\.sources: set output="):
        held(tmp_path / "late", wrong).refuse_another(right)


@pytest.mark.parametrize("content", ["", "seed: [", "sede: 3\n"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, content: str) -> None:
    folder = held(tmp_path, Run(seed=4))
    folder.settings.write_text(content)
    with pytest.raises(ConfigError, match="remove it to go on"):
        folder.refuse_another(Run(seed=4))


def test_settings_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = held(tmp_path, Run(seed=4))

    def cut_short(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text[:10].encode())
        raise OSError("killed")

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(OSError, match="killed"):
        folder.leave_settings(Run(seed=4))
    assert load_run(folder.settings) == Run(seed=4)


def other(**more: Any) -> Run:
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
    assert difference(other(), other(**more)) is None


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
    assert difference(other(), other(**more)) == named


def test_a_new_rate_is_told(tmp_path: Path) -> None:
    folder = held(tmp_path, other())
    assert folder.new_rates(other(stage={"lr": 1e-4, "sp": 2})) == ["stages.0.lr"]


class Heads:
    num_attention_heads = 8


@pytest.mark.parametrize(("world", "sp", "batch", "advice"), [(2, 1, 3, 2), (4, 1, 2, 2), (4, 1, 3, 4), (8, 2, 6, 4)])
def test_the_degree_advised_is_one_that_goes(world: int, sp: int, batch: int, advice: int) -> None:
    run = other(stage={"batch": batch}, mesh={"sp": sp})
    with pytest.raises(MeshError, match=f"mesh.sp={advice}$"):
        choose_sp(run, 0, world, Heads())
    assert choose_sp(other(stage={"batch": batch}, mesh={"sp": advice}), 0, world, Heads()) == advice
