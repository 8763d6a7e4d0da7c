"""`python -m benchmarks.stale` in a repository made here: its package, its results and their subjects are these tests'
own, so that none depends on a file of the package."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import carried, stale, stamps
from benchmarks.fingerprints import changed, on_disk

CODE = '''"""Docstring."""
from os import path
def double(x):
    """Return twice x."""
    return x * 2  # twice
'''
OTHER = "def half(x):\n    return x / 2\n"
DEVICE = {"device": "a card"}

Scratch = tuple[Path, Callable[..., int]]


def git(root: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "tests: change")
    return git(root, "rev-parse", "--short=12", "HEAD")


def cell(length: int, seconds: float, **more: Any) -> dict[str, Any]:
    known = {"system": "ithaca", "model": "8B", "length": length, "settings": {}, "outcome": "done", "run": 0}
    return known | {"seconds": seconds, "allocated_gib": 10.0, "loss": 12.5} | more


def write(root: Path, name: str, result: dict[str, Any]) -> Path:
    file = root / stamps.RESULTS / name
    stamps.save(file, result)
    return file


def code(root: Path, name: str, text: str) -> None:
    file = root / "pack" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    """A repository with two modules, two cells of step.json and a part of losses.json, and the command in it."""
    monkeypatch.setattr(stamps, "SUBJECTS", {"step": ("pack/*",), "loss": ("pack/*", "apart/*"), "peers": ("peers/*",)})
    monkeypatch.setattr(stale, "SUBJECTS", stamps.SUBJECTS)
    root = tmp_path / "repository"
    code(root, "one.py", CODE)
    code(root, "two.py", OTHER)
    (root / "apart").mkdir()
    (root / "apart" / "three.py").write_text("x = 1\n")
    git(root, "init", "-q")
    write(root, "step.json", {"runs": [DEVICE], "cells": [cell(32, 4.0), cell(128, 41.0)]})
    write(root, "losses.json", {"rows": [1, 2]})
    commit(root)
    return root, lambda *words: stale.main(["--root", str(root), *words])


@pytest.fixture
def stamped(scratch: Scratch) -> Scratch:
    root, run = scratch
    for name in ("step.json", "losses.json"):
        assert run("--stamp", name, "history") == 0
    commit(root)
    return scratch


def states(scratch: Scratch, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert scratch[1]("--json") == 0
    return {each["figure"]: each for each in json.loads(capsys.readouterr().out)}


def again(root: Path, tmp_path: Path, *cells: dict[str, Any], device: dict[str, str] | None = None) -> Path:
    """Cells measured on the code at HEAD, stamped as a program stamps them."""
    result: dict[str, Any] = {"runs": [device or DEVICE], "cells": list(cells)}
    for each in cells:
        stamps.mark(result, "step", each, root)
    file = tmp_path / "new.json"
    stamps.save(file, result)
    return file


def test_result_without_stamp_is_said_so(scratch: Scratch, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = scratch
    assert {each["state"] for each in states(scratch, capsys).values()} == {"no stamp"}
    assert run() == 0
    assert "no stamp: not known on which code" in capsys.readouterr().out
    assert run("--check") == 1


def test_stamp_from_history_is_the_commit_that_brought_the_value(
    scratch: Scratch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = scratch
    first = git(root, "rev-parse", "--short=12", "HEAD")
    code(root, "one.py", CODE.replace("* 2", "* 3"))
    write(root, "step.json", {"runs": [{}, DEVICE], "cells": [cell(32, 3.9), cell(128, 41.0, run=1)]})
    second = commit(root)
    code(root, "one.py", CODE)
    commit(root)
    assert run("--stamp", "step.json", "history") == 0
    found = states(scratch, capsys)
    assert found["ithaca, 8B, 32"]["commit"] == second
    assert found["ithaca, 8B, 32"]["changed"] == ["pack/one.py"]
    assert found["ithaca, 8B, 128"]["commit"] == first
    assert found["ithaca, 8B, 128"]["state"] == "current"
    assert found["ithaca, 8B, 128"]["from_history"]


def test_stamp_of_one_figure_leaves_the_others(scratch: Scratch, capsys: pytest.CaptureFixture[str]) -> None:
    root, run = scratch
    head = git(root, "rev-parse", "HEAD")
    assert run("--stamp", "step.json", head, "--only", "128") == 0
    found = states(scratch, capsys)
    assert found["ithaca, 8B, 128"]["commit"] == head[:12]
    assert found["ithaca, 8B, 32"]["state"] == "no stamp"


def test_changed_code_is_stale_and_named(stamped: Scratch, capsys: pytest.CaptureFixture[str]) -> None:
    root, run = stamped
    assert run("--check") == 0
    code(root, "one.py", CODE.replace("* 2", "* 3"))
    assert {tuple(each["changed"]) for each in states(stamped, capsys).values()} == {("pack/one.py",)}
    assert run() == 0
    assert "stale: pack/one.py" in capsys.readouterr().out
    assert run("--check") == 1


@pytest.mark.parametrize(
    "text",
    [
        CODE.replace("Docstring", "Another").replace("Return twice x.", "Give it twice."),
        CODE.replace("# twice", "# two times"),
        CODE.replace("from os import path", "from os import sep\nimport sys\n__all__ = ['double']"),
        CODE.replace("x * 2", "(x *\n        2)"),
    ],
    ids=["docstring", "comment", "import", "formatting"],
)
def test_prose_and_imports_are_not_stale(stamped: Scratch, capsys: pytest.CaptureFixture[str], text: str) -> None:
    code(stamped[0], "one.py", text)
    assert {each["state"] for each in states(stamped, capsys).values()} == {"current"}


def test_moved_file_is_not_stale(stamped: Scratch, capsys: pytest.CaptureFixture[str]) -> None:
    root, _ = stamped
    (root / "pack" / "deep").mkdir()
    (root / "pack" / "one.py").rename(root / "pack" / "deep" / "uno.py")
    code(root, "deep/__init__.py", '"""A folder."""\n')
    assert {each["state"] for each in states(stamped, capsys).values()} == {"current"}


def test_new_and_gone_files_are_named_as_such(stamped: Scratch, capsys: pytest.CaptureFixture[str]) -> None:
    root, _ = stamped
    (root / "pack" / "one.py").unlink()
    code(root, "four.py", "y = 4\n")
    found = states(stamped, capsys)["ithaca, 8B, 32"]
    assert found["changed"] == ["pack/four.py (new)", "pack/one.py (gone)"]


def test_two_equal_files_of_which_one_changes_are_stale(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        code(tmp_path, name, OTHER)
    then = on_disk(tmp_path, ["pack/*"])
    code(tmp_path, "two.py", CODE)
    assert changed(then, on_disk(tmp_path, ["pack/*"])) == ["pack/two.py"]


def test_mark_of_changed_code_has_a_plus(stamped: Scratch) -> None:
    root, _ = stamped
    result: dict[str, Any] = {"rows": [1]}
    stamps.mark(result, "losses", root=root)
    assert result["measured"]["sources"][0]["commit"] == git(root, "rev-parse", "--short=12", "HEAD")
    (root / "apart" / "three.py").write_text("x = 2\n")
    stamps.mark(result, "losses", root=root)
    [source] = result["measured"]["sources"]
    assert source["commit"].endswith("+")


def test_mark_without_git_has_files_alone(tmp_path: Path, scratch: Scratch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    code(tmp_path / "copy", "one.py", CODE)
    result: dict[str, Any] = {"rows": [1]}
    stamps.mark(result, "losses", root=tmp_path / "copy")
    [source] = result["measured"]["sources"]
    assert source["commit"] is None
    assert list(source["files"]) == ["pack/one.py"]


def test_cells_that_repeat_carry_the_others(
    stamped: Scratch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = stamped
    first = states(stamped, capsys)["ithaca, 8B, 32"]["commit"]
    code(root, "one.py", CODE.replace("* 2", "* 3"))
    head = commit(root)
    new = again(root, tmp_path, cell(32, 4.03))
    assert run("--carry", "step.json", "losses.json", "--again", str(new)) == 0
    found = states(stamped, capsys)
    for figure in ("ithaca, 8B, 128", "rows"):
        each = found[figure]
        assert (each["state"], each["commit"], each["carried"]["commit"]) == ("current", first, head)
        assert "+0.75% (spread 1.00%)" in each["carried"]["comparisons"][0]
        assert len(each["carried"]["comparisons"]) == 3
    assert run() == 0
    assert f"carried over from {first} to {head}" in capsys.readouterr().out
    code(root, "one.py", CODE.replace("* 2", "* 4"))
    assert states(stamped, capsys)["rows"]["state"] == "stale"


@pytest.mark.parametrize(
    "more", [{"seconds": 4.05}, {"seconds": 3.95}, {"allocated_gib": 10.1}, {"loss": 12.51}], ids=lambda more: str(more)
)
def test_cells_outside_their_spread_carry_nothing(stamped: Scratch, tmp_path: Path, more: dict[str, float]) -> None:
    root, run = stamped
    code(root, "one.py", CODE.replace("* 2", "* 3"))
    commit(root)
    before = (root / stamps.RESULTS / "losses.json").read_text()
    new = again(root, tmp_path, cell(32, 4.0) | more, cell(128, 41.0))
    with pytest.raises(SystemExit, match=r"does not repeat(.|\n)*nothing is carried over"):
        run("--carry", "losses.json", "--again", str(new))
    assert (root / stamps.RESULTS / "losses.json").read_text() == before


def test_files_that_no_cell_runs_are_not_carried_unless_asked_for(
    stamped: Scratch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = stamped
    (root / "apart" / "three.py").write_text("x = 2\n")
    commit(root)
    words = ("--carry", "losses.json", "--again", str(again(root, tmp_path, cell(32, 4.0))))
    assert run(*words) == 0
    assert "not carried over, the cells do not run apart/three.py" in capsys.readouterr().out
    assert states(stamped, capsys)["rows"]["state"] == "stale"
    assert run(*words, "--beyond") == 0
    assert run() == 0
    assert "which do not run apart/three.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "carried"),
    [(4.06, 4.07, True), (4.06, 4.0, False), (4.0, 4.0, True), (4.2, 4.2, False)],
    ids=["another card", "the newer faster there", "the same card", "the older is of other work"],
)
def test_newer_version_is_compared_with_older_on_its_card(
    stamped: Scratch, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: float, new: float, *, carried: bool
) -> None:
    root, run = stamped
    code(root, "one.py", CODE.replace("* 2", "* 3"))
    commit(root)
    cells = cell(32, new) | {"version": stamps.HERE}, cell(32, old) | {"version": "1a2b3c4"}
    words = ("--carry", "losses.json", "--again", str(again(root, tmp_path, *cells)))
    if not carried:
        with pytest.raises(SystemExit, match="nothing is carried over"):
            run(*words)
        return
    assert run(*words) == 0
    said = states(stamped, capsys)["rows"]["carried"]["comparisons"]
    assert said[0].startswith("ithaca, 8B, 32, 1a2b3c4: seconds 4,")
    assert said[3].startswith(f"ithaca, 8B, 32: seconds {old:.6g}, again {new:.6g}")


def test_cells_of_other_code_than_head_carry_nothing(stamped: Scratch, tmp_path: Path) -> None:
    root, run = stamped
    new = again(root, tmp_path, cell(32, 4.0))
    code(root, "one.py", CODE.replace("* 2", "* 3"))
    commit(root)
    with pytest.raises(SystemExit, match=r"other code than HEAD's: pack/one\.py"):
        run("--carry", "losses.json", "--again", str(new))


@pytest.mark.parametrize(
    ("steps", "earlier", "spread"),
    [
        ([4.0, 4.001], [], 0.01),
        ([4.0, 4.06], [], 0.015),
        ([4.0, 4.5], [], 0.02),
        ([4.0, 4.001], [4.02], 0.005),
        ([4.0], [4.9, 4.0], 0.01),
        ([4.0], [3.98, 4.02], 4.02 / 3.98 - 1),
    ],
)
def test_spread_is_that_of_steps_and_history(steps: list[float], earlier: list[float], spread: float) -> None:
    one = cell(32, min(steps), steps_s=steps)
    past = [cell(32, seconds) for seconds in earlier] + [cell(32, 4.03, allocated_gib=11.0)]
    assert carried.spread_of(one, one, past) == pytest.approx(spread)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stamp", "step.json", "nowhere"], "nowhere is no commit"),
        (["--stamp", "none.json", "HEAD"], "name a file of benchmarks/results: losses.json, step.json"),
        (["--stamp", "step.json", "HEAD", "--only", "70B"], "no figure of step.json has '70B'"),
        (["--stamp", "step.json"], "expected 2 arguments"),
        (["--carry", "step.json"], "--carry FILES and --again NEW.json go together"),
        (["--carry", "step.json", "--again", "none.json"], "no such file"),
        (["--beyond"], "--beyond belongs to --carry"),
        (["--wrong"], "unrecognized arguments: --wrong"),
    ],
)
def test_bad_arguments_end_in_one_sentence(scratch: Scratch, words: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        scratch[1](*words)
    assert said in str(ended.value)
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize(
    ("cells", "device", "said"),
    [
        ([cell(64, 4.0)], None, "not among the committed cells"),
        ([cell(32, 4.0)], {"device": "another"}, "measured on a card and again on another"),
        ([cell(32, 4.0, system="liger")], None, "no cell of Ithaca"),
        ([cell(32, 4.0, outcome="out of memory")], None, "nothing to compare"),
    ],
)
def test_cells_that_compare_nothing_end_in_one_sentence(
    stamped: Scratch, tmp_path: Path, cells: list[dict[str, Any]], device: dict[str, str] | None, said: str
) -> None:
    root, run = stamped
    with pytest.raises(SystemExit, match=said):
        run("--carry", "step.json", "--again", str(again(root, tmp_path, *cells, device=device)))


def test_unstamped_cells_carry_nothing(stamped: Scratch, tmp_path: Path) -> None:
    file = tmp_path / "new.json"
    stamps.save(file, {"runs": [DEVICE], "cells": [cell(32, 4.0)]})
    with pytest.raises(SystemExit, match="measured again has no stamp"):
        stamped[1]("--carry", "step.json", "--again", str(file))


def test_cell_measured_for_another_group_has_its_stamp(stamped: Scratch) -> None:
    result = json.loads((stamped[0] / stamps.RESULTS / "step.json").read_text())
    one, other = result["cells"][0], cell(64, 4.0)
    stamps.mark_like(result, other, one)
    figures = result["measured"]["figures"]
    assert figures["ithaca, 8B, 64"] == figures["ithaca, 8B, 32"]
