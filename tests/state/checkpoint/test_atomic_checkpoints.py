"""A checkpoint is whole or not there: broken files, full disks, processes killed at any moment.

Killed at every single operation on the file system, and with -9 at random moments; what is found afterwards is the last
whole checkpoint, and nothing half-written is left.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ithaca.errors import CheckpointError
from ithaca.mesh import init_mesh
from ithaca.state.checkpoint import checkpoints as module
from ithaca.state.checkpoint import dcp, manifest
from ithaca.state.checkpoint.checkpoints import Checkpoints
from tests.ranks import ROOT, expect_refusal, run_ranks


def keep_of(folder: str | Path, *, background: bool = False, keep: int = 2) -> Checkpoints:
    return Checkpoints(Path(folder), keep, init_mesh(), background=background)


def numbers(step: int) -> dict[str, Tensor]:
    return {"a": torch.full((64, 3), float(step)), "b": torch.arange(5) + step}


BREAKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda path: _rewrite(path, lambda data: data[:-1]), "bytes, .* were written"),
    "flipped": (lambda path: _rewrite(path, lambda data: data[:-1] + bytes([data[-1] ^ 1])), "has changed"),
    "gone": (lambda path: next(path.glob("*.safetensors")).unlink(), "is missing"),
    "facts": (lambda path: (path / "facts.json").write_text("{}"), r"facts\.json has"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"manifest\.json cannot be read"),
    "half a manifest": (
        lambda path: (path / "manifest.json").write_text('{"files": {'),
        r"manifest\.json cannot be read",
    ),
    "another manifest": (lambda path: (path / "manifest.json").write_text('{"files": {}, "format": 2}'), "version"),
}


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    file = next(path.glob("*.safetensors"))
    file.write_bytes(change(file.read_bytes()))


def broken_are_passed_over(folder: str) -> dict[str, tuple[str, str]]:
    """Return the checkpoint found and the warning, for every way to break the newest."""
    found = {}
    for name, (spoil, _) in BREAKS.items():
        keeper = keep_of(Path(folder) / name)
        for step in (1, 2):
            keeper.save(step, numbers(step), {})
        assert keeper.latest() == keeper.folder / "step-00000002"
        spoil(keeper.folder / "step-00000002")
        with patch.object(module.logger, "warning") as said:
            path = keeper.latest()
        found[name] = ("nothing" if path is None else path.name, str(said.call_args.args[1]))
    return found


def test_checkpoint_not_whole_is_reported_and_skipped(tmp_path: Path) -> None:
    found = run_ranks(1, broken_are_passed_over, str(tmp_path))[0]
    for name, (_, said) in BREAKS.items():
        assert found[name][0] == "step-00000001", name
        assert re.search(said, found[name][1]), found[name]


class Killed(BaseException):
    """Stand for kill -9: no handler catches this error."""


@contextmanager
def killed_at(operation: int) -> Iterator[None]:
    """The n-th operation on the file system does not happen, nor any after it."""
    count = [0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] >= operation:
                raise Killed
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("rename", "mkdir", "unlink", "rmdir", "fsync", "open"):
            stack.enter_context(patch.object(os, name, wrap(getattr(os, name))))
        yield


def killed_everywhere(folder: str) -> list[str]:
    """A second save of the same step and a rotation, killed at each operation in turn; what is found each time."""
    found = []
    for operation in range(1, 200):
        place = Path(folder) / str(operation)
        keeper = keep_of(place, keep=1)
        keeper.save(1, numbers(1), {})
        keeper.save(2, numbers(2), {}, pin=True)
        ended = False
        try:
            with killed_at(operation):
                keeper.save(2, numbers(20), {})
                ended = True
        except Killed:
            pass
        again = keep_of(place, keep=1)
        path = again.latest()
        tensors = numbers(0)
        if path is not None:
            again.load(path, tensors)
        left = [each.name for each in place.iterdir() if each.name.startswith(".")]
        found.append(f"{None if path is None else path.name} {int(tensors['a'][0, 0])} {left}")
        shutil.rmtree(place)
        if ended:
            return found
    raise AssertionError("the save never ended")


def test_checkpoint_killed_at_any_file_operation_is_whole(tmp_path: Path) -> None:
    found = run_ranks(1, killed_everywhere, str(tmp_path))[0]
    assert len(found) > 10
    assert set(found) == {"step-00000002 2 []", "step-00000002 20 []"}
    assert found[0].split()[1] == "2"
    assert found[-1].split()[1] == "20"


def random_kills(folder: Path) -> dict[str, Any]:
    """A process that saves without end, killed with -9 twenty times; its own account, by `tests/state/checkpoint/killed.py`."""
    command = [sys.executable, "-m", "tests.state.checkpoint.killed", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    account: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return account


@pytest.mark.slow
def test_checkpoint_killed_at_random_times_is_whole(tmp_path: Path) -> None:
    account = random_kills(tmp_path)
    assert len(account["found"]) == 20
    assert account["wrong"] == []
    # Some of the kills fell into a write, or nothing was tried.
    assert account["cut"] > 0
    assert account["found"] == sorted(account["found"])


class FullDisk(OSError):
    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "No space left on device")


def full_disk(folder: str, background: bool, where: str) -> dict[str, Any]:
    """The disk is full on one rank while the second checkpoint is written; the third has room again."""
    mesh = init_mesh()
    keeper = Checkpoints(Path(folder), 2, mesh, background=background)
    keeper.save(1, numbers(1), {}, wait=True)
    targets: Any = {
        "tensors": (module, "write_tensors"),
        "sync": (dcp, "force_to_disk"),
        "seal": (manifest, "_write"),
    }
    target = targets[where]
    said = ""
    with ExitStack() as stack:
        if mesh.rank == (0 if where == "seal" else mesh.world - 1):
            real = getattr(*target)

            def fail(*args: Any) -> Any:
                if where == "tensors":
                    # The plans are made together: the failure is in the write itself.
                    with patch.object(dcp.HuggingFaceStorageWriter, "write_data", side_effect=FullDisk()):
                        return real(*args)
                raise FullDisk

            stack.enter_context(patch.object(*target, fail))
        stack.enter_context(patch.object(module.logger, "error"))
        try:
            keeper.save(2, numbers(2), {})
            keeper.wait()
        except CheckpointError as error:
            said = str(error)
    found = keeper.latest()
    assert found is not None
    left = sorted(path.name for path in Path(folder).iterdir())
    keeper.save(3, numbers(3), {})
    keeper.wait()
    last = keeper.latest()
    assert last is not None
    return {"said": said, "found": found.name, "left": left, "last": last.name}


@pytest.mark.parametrize("where", ["tensors", "sync", "seal"])
@pytest.mark.parametrize("background", [True, False])
def test_checkpoint_full_disk_keeps_last_whole(where: str, background: bool, tmp_path: Path) -> None:
    for result in run_ranks(2, full_disk, str(tmp_path), background, where):
        assert "step 2 was not written: [Errno 28] No space left on device" in result["said"]
        assert result["found"] == "step-00000001"
        assert result["left"] == ["step-00000001"]
        assert result["last"] == "step-00000003"


def limited(folder: str) -> tuple[str, str]:
    """A real limit on the size of files, on one rank."""
    keeper = Checkpoints(Path(folder), 2, init_mesh(), background=True)
    tensors = {"a": torch.zeros(2**18)} if keeper._mesh.rank else {"a": torch.zeros(2**18), "z": torch.zeros(2**16)}
    keeper.save(1, numbers(1), {}, wait=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if keeper._mesh.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with patch.object(module.logger, "error"):
            keeper.save(2, tensors, {})
            keeper.wait()
        said = ""
    except CheckpointError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = keeper.latest()
    assert found is not None
    return said, found.name


def test_checkpoint_refused_write_is_reported(tmp_path: Path) -> None:
    for said, found in run_ranks(2, limited, str(tmp_path)):
        assert "File too large" in said
        assert found == "step-00000001"


def no_room(folder: str) -> None:
    keeper = keep_of(folder)
    usage = shutil.disk_usage(folder)._replace(free=700)
    with patch.object(module.shutil, "disk_usage", return_value=usage):
        keeper.save(1, numbers(1), {})


def test_checkpoint_too_little_disk_is_refused_early(tmp_path: Path) -> None:
    expect_refusal(2, no_room, str(tmp_path), error="CheckpointError", match=r"needs 0\.00 MiB .* has 0\.00 MiB free")
    assert list(tmp_path.iterdir()) == []


def background_failure(folder: str) -> tuple[list[str], list[str]]:
    """A failure behind the run's back is logged at once and does not stop the next save."""
    keeper = keep_of(folder, background=True)
    with patch.object(module, "write_tensors", side_effect=FullDisk()), patch.object(module.logger, "error") as logged:
        keeper.save(1, numbers(1), {})
        keeper._join()
        keeper.save(2, numbers(2), {})
        keeper._join()
    keeper.save(3, numbers(3), {})
    keeper.wait()
    return [str(call.args[1]) for call in logged.call_args_list], sorted(p.name for p in Path(folder).iterdir())


def test_checkpoint_background_failure_is_logged(tmp_path: Path) -> None:
    logged, left = run_ranks(1, background_failure, str(tmp_path))[0]
    assert [re.search(r"step (\d)", said)[1] for said in logged] == ["1", "2"]  # type: ignore[index]
    assert left == ["step-00000003"]


def rotated(folder: str) -> list[list[str]]:
    keeper = keep_of(folder)
    seen = []
    for step in range(1, 7):
        keeper.save(step, numbers(step), {}, pin=step == 2)
        seen.append(sorted(path.name[-1] for path in Path(folder).iterdir()))
    keeper.save(6, numbers(60), {}, pin=True)
    tensors = numbers(0)
    keeper.load(Path(folder) / "step-00000006", tensors)
    assert int(tensors["a"][0, 0]) == 60
    keeper.save(7, numbers(7), {})
    keeper.save(8, numbers(8), {})
    seen.append(sorted(path.name[-1] for path in Path(folder).iterdir()))
    return seen


def test_rotation_removes_old_keeps_pinned(tmp_path: Path) -> None:
    seen = run_ranks(1, rotated, str(tmp_path))[0]
    assert ["".join(each) for each in seen] == ["1", "12", "123", "234", "245", "256", "2678"]


def own_folders(folder: str) -> None:
    mesh = init_mesh()
    Checkpoints(Path(folder) / (str(mesh.rank) if mesh.rank else ""), 2, mesh, background=False)


def test_checkpoint_unshared_folder_is_refused(tmp_path: Path) -> None:
    expect_refusal(2, own_folders, str(tmp_path), error="CheckpointError", match="not the same folder for all ranks")
