"""Tests of `ithaca.atomic`: after any failure the old file or folder is there whole, or the new one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from ithaca.atomic import force_to_disk, free_bytes, nearest_folder, part_of, remove, replace_folder, write_whole

FULL = OSError(errno.ENOSPC, "No space left on device")


class Killed(BaseException):
    """Exception in place of a SIGKILL: no handler catches it."""


@contextmanager
def killed_at_rename(number: int) -> Iterator[None]:
    """End the process's work at its n-th rename."""
    real, count = Path.rename, [0]

    def rename(path: Path, to: Path) -> Path:
        count[0] += 1
        if count[0] == number:
            raise Killed
        return real(path, to)

    with patch.object(Path, "rename", rename):
        yield


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("name", "part"), [("run.yaml", ".run.yaml.part"), (".mark.json", ".mark.json.part")])
def test_part_is_hidden_beside_its_target(name: str, part: str, tmp_path: Path) -> None:
    assert part_of(tmp_path / name) == tmp_path / part


@pytest.mark.parametrize("content", ["déjà\n", b"\0\1"])
def test_written_file_replaces_the_old_one(content: str | bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    write_whole(file, content)
    assert file.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert names(tmp_path) == ["a.json"]


def test_written_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
@pytest.mark.parametrize("failure", [FULL, KeyboardInterrupt()])
def test_failed_write_leaves_the_old_file_alone(step: str, failure: BaseException, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with patch.object(Path, step, side_effect=failure), pytest.raises(type(failure)):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_folder_replaces_the_old_one(durable: bool, before: bool, tmp_path: Path) -> None:
    place, aside = tmp_path / "a", tmp_path / ".a.old"
    if before:
        place.mkdir()
        (place / "old").touch()
    part_of(place).mkdir()
    (part_of(place) / "new").touch()
    synced: list[int] = []
    real = os.fsync
    with patch.object(os, "fsync", lambda handle: (synced.append(handle), real(handle))):
        replace_folder(part_of(place), place, aside, durable=durable)
    assert (names(tmp_path), names(place)) == (["a"], ["new"])
    assert len(synced) == 2 * durable


@pytest.mark.parametrize(("number", "left"), [(1, [".a.part", "a"]), (2, [".a.old", ".a.part"])])
def test_killed_replacement_leaves_both_folders_whole(number: int, left: list[str], tmp_path: Path) -> None:
    place = tmp_path / "a"
    for folder in (place, part_of(place)):
        folder.mkdir()
    with killed_at_rename(number), pytest.raises(Killed):
        replace_folder(part_of(place), place, tmp_path / ".a.old")
    assert names(tmp_path) == left


def test_remove_of_a_link_keeps_its_target(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("folder", "file", "link", "nowhere", "never there"):
        remove(tmp_path / name)
    assert names(tmp_path) == ["kept"]


def test_synced_file_is_closed(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    opened = len(os.listdir("/proc/self/fd"))
    force_to_disk(tmp_path)
    with patch.object(os, "fsync", side_effect=FULL), pytest.raises(OSError, match="No space"):
        force_to_disk(tmp_path / "a")
    assert len(os.listdir("/proc/self/fd")) == opened


def test_free_bytes_of_missing_folder_are_those_of_its_parent(tmp_path: Path) -> None:
    deep = tmp_path / "not" / "there"
    (tmp_path / "file").touch()
    assert nearest_folder(deep) == nearest_folder(tmp_path / "file") == tmp_path
    usage = shutil.disk_usage(tmp_path)._replace(free=700)
    with patch.object(shutil, "disk_usage", return_value=usage) as asked:
        assert free_bytes(deep) == 700
    asked.assert_called_once_with(tmp_path)
