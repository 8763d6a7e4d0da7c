"""Checkpoints of a run whose disk spoils any of them at any time: whole ones are never lost, damaged ones never count.

Every kind of damage, drawn by a seed, between saves and between starts, on one rank and on several.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ithaca.errors import CheckpointError
from ithaca.mesh import init_mesh
from ithaca.state.checkpoint import manifest, verified_files
from ithaca.state.checkpoint.checkpoints import Checkpoints
from tests.ranks import expect_refusal, run_ranks


def numbers(step: int) -> dict[str, Tensor]:
    return {"a": torch.full((64, 3), float(step)), "b": torch.arange(5) + step}


def keep_of(folder: str | Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(Path(folder), keep, init_mesh(), background=False)


def flip(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def some(path: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(file for file in path.iterdir() if file.is_file()))


def empty(path: Path, _: random.Random) -> None:
    shutil.rmtree(path)
    path.mkdir()


def forget_all(path: Path, _: random.Random) -> None:
    (path / "manifest.json").write_text('{"files": {}, "format": 1}')


def swap(path: Path, _: random.Random) -> None:
    """The folder of another step under this one's name."""
    other = next((each for each in manifest.listed(path.parent) if each != path), None)
    if other is not None:
        shutil.rmtree(path)
        shutil.copytree(other, path)
    else:
        path.rename(path.with_name("step-00099999"))


SPOILS: dict[str, Callable[[Path, random.Random], Any]] = {
    "flipped": lambda path, draw: flip(draw.choice(sorted(path.glob("[sf]*"))), draw),
    "cut": lambda path, draw: (file := some(path, draw)).write_bytes(file.read_bytes()[:-1]),
    "gone": lambda path, draw: some(path, draw).unlink(),
    "no manifest": lambda path, draw: (path / "manifest.json").unlink(),
    "flipped anywhere": lambda path, draw: flip(some(path, draw), draw),
    "empty": empty,
    "forgetful": forget_all,
    "of another step": swap,
    "a folder for a file": lambda path, draw: ((file := some(path, draw)).unlink(), file.mkdir()),
    "a link that leads nowhere": lambda path, draw: ((file := some(path, draw)).unlink(), file.symlink_to("nothing")),
}
# What lies about and spoils nothing.
LITTER: list[Callable[[Path], Any]] = [
    lambda folder: (folder / "step-00000099").touch(),
    lambda folder: (folder / "step-7").mkdir(exist_ok=True),
    lambda folder: (folder / "notes.txt").write_text("mine"),
    lambda folder: (folder / ".step-00000050.part").mkdir(exist_ok=True),
    lambda folder: [(path / "extra.safetensors").write_bytes(b"none of it") for path in manifest.listed(folder)[:1]],
]


def whole_of(path: Path) -> bool:
    """An account of its own: the content is what that step wrote, by another reader than the one that is tried."""
    try:
        from safetensors.torch import load_file

        files = [load_file(file) for file in sorted(path.glob("shard-*.safetensors"))]
        found = {key: tensor for each in files for key, tensor in each.items()}
        right = numbers(manifest.step_of(path))
        return manifest.problem_of(path) is None and torch.equal(found["b"], right["b"])
    except Exception:
        return False


def voyage(folder: str, seed: int) -> list[str]:
    """Saves, damage and new starts in an order drawn by `seed`; what went wrong."""
    draw, place, mesh = random.Random(seed), Path(folder) / str(seed), init_mesh()
    keeper, wrong, step = Checkpoints(place, 2, mesh, background=False), [], 0
    for _ in range(12):
        before = {path.name for path in manifest.listed(place) if whole_of(path)}
        step += 1
        keeper.save(step, numbers(step), {}, pin=draw.random() < 0.15)
        after = {path.name for path in manifest.listed(place) if whole_of(path)}
        # Who maps a file that another rank cuts short dies of SIGBUS: all have looked before the first one spoils.
        torch.distributed.barrier()
        if mesh.rank == 0 and manifest.name_of(step) not in after:
            wrong.append(f"{step}: the new one is not there")
        if mesh.rank == 0 and len(after) < min(2, len(before) + 1):
            wrong.append(f"{step}: {sorted(before)} became {sorted(after)}")
        chance = draw.random()
        # All ranks draw alike; the first one does it.
        spoils = [(draw.choice(sorted(SPOILS)), draw.random()) for _ in range(draw.choice([0, 0, 1, 1, 2]))]
        if mesh.rank == 0:
            draw.choice(LITTER)(place)
            for kind, which in spoils:
                there = manifest.listed(place)
                with suppress(IndexError, OSError):  # What is spoiled already may not be spoiled again.
                    SPOILS[kind](there[int(which * len(there))], random.Random(seed))
        else:
            draw.choice(LITTER)
        torch.distributed.barrier()
        left = sorted(path for path in manifest.listed(place) if whole_of(path))
        torch.distributed.barrier()
        if chance < 0.4:
            keeper = Checkpoints(place, 2, mesh, background=False)
        if chance < 0.6:
            try:
                found = keeper.latest()
            except CheckpointError as error:
                wrong += [f"{step}: {error}"] if left or "none is whole" not in str(error) else []
                keeper.latest(restart=True)
                found = None
            if found != (left[-1] if left else None):
                wrong.append(f"{step}: {found} of {left}")
            if found is not None:
                tensors = numbers(0)
                keeper.load(found, tensors)
                if not torch.equal(tensors["a"], numbers(manifest.step_of(found))["a"]):
                    wrong.append(f"{step}: {found} is not what it was")
                step = max(step, manifest.step_of(found))
        torch.distributed.barrier()
    return wrong


def voyages(folder: str, seeds: list[int]) -> list[str]:
    return [f"seed {seed}, {wrong}" for seed in seeds for wrong in voyage(folder, seed)]


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
def test_rotation_random_damage_keeps_whole_checkpoints(tmp_path: Path, world: int) -> None:
    assert run_ranks(world, voyages, str(tmp_path), list(range(8))) == [[]] * world


@pytest.mark.slow
def test_rotation_long_random_damage_keeps_whole_checkpoints(tmp_path: Path) -> None:
    assert run_ranks(3, voyages, str(tmp_path), list(range(100, 160)), timeout=600) == [[]] * 3


def both_corrupt(folder: str) -> list[Any]:
    """Two damaged checkpoints with the highest numbers while a run goes on from an older place."""
    keeper = keep_of(folder)
    for step in (90, 91):
        keeper.save(step, numbers(step), {})
    for path in manifest.listed(keeper.folder):
        flip(path / "shard-00001-model-00001-of-00001.safetensors", random.Random(0))
    seen = []
    for step in (1, 2, 3):
        keeper.save(step, numbers(step), {})
        seen.append(sorted(path.name for path in keeper.folder.iterdir()))
    return seen


def test_rotation_damaged_checkpoints_do_not_count(tmp_path: Path) -> None:
    seen = run_ranks(1, both_corrupt, str(tmp_path))[0]
    aside = ["corrupt-step-00000090", "corrupt-step-00000091"]
    assert [[name for name in names if "corrupt" not in name] for names in seen] == [
        ["step-00000001"], ["step-00000001", "step-00000002"], ["step-00000002", "step-00000003"],
    ]  # fmt: skip
    assert seen[-1][:2] == aside


def start_again(folder: str, spoil: str, restart: bool) -> str | None:
    mesh = init_mesh()
    keeper = Checkpoints(Path(folder), 2, mesh, background=False)
    for step in (1, 2):
        keeper.save(step, numbers(step), {})
    if mesh.rank == 0:
        for path in manifest.listed(keeper.folder):
            SPOILS[spoil](path, random.Random(1))
    torch.distributed.barrier()
    found = Checkpoints(Path(folder), 2, mesh, background=False).latest(restart=restart)
    return None if found is None else found.name


@pytest.mark.few(4)
@pytest.mark.parametrize("spoil", [name for name in SPOILS if name not in ("of another step", "flipped anywhere")])
def test_start_without_whole_checkpoint_stops_unless_restart(tmp_path: Path, spoil: str) -> None:
    expect_refusal(
        2, start_again, str(tmp_path / "a"), spoil, False, error="CheckpointError",
        match=r"holds 2 checkpoints and none is whole .*--restart, which deletes none",
    )  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["step-00000001", "step-00000002"]
    assert run_ranks(2, start_again, str(tmp_path / "b"), spoil, True) == [None, None]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "corrupt-step-00000001",
        "corrupt-step-00000002",
    ]
    # Nothing was trained since: a start that does not ask for it stops again, so that no scheduler begins anew unseen.
    expect_refusal(
        1, newest, str(tmp_path / "b"), error="CheckpointError", match="were set aside as damaged.*--restart"
    )


def newest(folder: str) -> str | None:
    found = keep_of(folder).latest()
    return None if found is None else found.name


def reads(folder: str) -> list[list[str]]:
    """Return the data files read at a save, at later checks, after a change, and at a new start."""
    read: list[str] = []
    real = manifest._sum

    def noted(file: Path) -> dict[str, int]:
        read.append(f"{file.parent.name}/{file.name}")
        return real(file)

    seen = []
    with patch.object(manifest, "_sum", noted), patch.object(verified_files, "_RACY_NS", 0):
        keeper = keep_of(folder)
        shard = "shard-00001-model-00001-of-00001.safetensors"

        def look(action: Callable[[], Any]) -> None:
            read.clear()
            action()
            seen.append([name for name in read if name.endswith(shard)])

        look(lambda: keeper.save(1, numbers(1), {}))
        look(lambda: (keeper.latest(), keeper.latest(), keeper.at(1), keeper.save(2, numbers(2), {})))
        file = keeper.folder / "step-00000002" / shard
        times = file.stat()
        file.write_bytes(file.read_bytes())
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        look(lambda: (keeper.at(2), keeper.at(2)))
        again = keep_of(folder)
        look(lambda: (again.latest(), again.latest()))
        look(lambda: (again.save(3, numbers(3), {}), again.save(4, numbers(4), {})))
    return seen


def test_verified_checkpoint_is_read_once(tmp_path: Path) -> None:
    """Not at all by the run that wrote it; once where a file changed, even to the same size and time; once by a start."""
    found = run_ranks(1, reads, str(tmp_path))[0]
    two = "step-00000002/shard-00001-model-00001-of-00001.safetensors"
    assert found == [[], [], [two], [two], []]


def sums_of_what_was_written(folder: str) -> list[str]:
    """The sums made on the way to the disk against those of the files."""
    keeper = keep_of(folder)
    keeper.save(1, {**numbers(1), "large": torch.randn(3_000_000)}, {})
    path = keeper.folder / "step-00000001"
    files = json.loads((path / "manifest.json").read_text())["files"]
    return [name for name, due in files.items() if manifest._sum(path / name) != due] + (
        [] if len(files) > 1 else ["few"]
    )


def test_write_sums_equal_files_sums(tmp_path: Path) -> None:
    assert run_ranks(2, sums_of_what_was_written, str(tmp_path)) == [[], []]


def spoiled_while_it_runs(folder: str) -> str:
    keeper = keep_of(folder)
    keeper.save(5, numbers(5), {})
    flip(keeper.folder / "step-00000005" / "shard-00001-model-00001-of-00001.safetensors", random.Random(2))
    keeper.at(5)
    return "found"


def test_stage_end_damaged_is_refused(tmp_path: Path) -> None:
    expect_refusal(
        1,
        spoiled_while_it_runs,
        str(tmp_path),
        error="CheckpointError",
        match=r"has changed since.*same command goes on",
    )
