"""What makes a checkpoint whole: a manifest of its files with sizes and checksums, and a rename.

A checkpoint is written into a hidden folder beside its place. When every file is on the disk and summed, the manifest
is written and the folder is renamed, which either happens or does not: at no moment is there a folder of that name
that is not whole. A checkpoint of the same name steps aside under a hidden name until the new one is in place.

Invariant: what `recover` leaves after any kill is either the old checkpoint or the new one, whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ithaca.errors import CheckpointError

MANIFEST = "manifest.json"
FACTS = "facts.json"
PINNED = "pinned"
_NAME = re.compile(r"step-(\d{8,})")
_PART = ".part"
_ASIDE = ".aside"
_PIECE = 16 * 2**20

Sums = dict[str, dict[str, int]]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise CheckpointError(f"{path} is no checkpoint: its name would be like {name_of(200)}")
    return int(found[1])


def part_of(folder: Path, step: int) -> Path:
    """The hidden folder that a checkpoint is written into."""
    return folder / f".{name_of(step)}{_PART}"


def listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first, whole or not."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def sums_of(folder: Path, names: Iterable[str]) -> Sums:
    """Size and checksum of files, each forced onto the disk."""
    return {name: _sum(folder / name, sync=True) for name in names}


def _sum(file: Path, *, sync: bool = False) -> dict[str, int]:
    total, size = 0, 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            total, size = zlib.crc32(piece, total), size + len(piece)
        if sync:
            os.fsync(stream.fileno())
    return {"size": size, "crc32": total}


def seal(part: Path, place: Path, sums: Sums, facts: dict[str, Any], *, pin: bool) -> None:
    """Write facts and manifest, and put the folder in its place."""
    _write(part / FACTS, facts)
    if pin:
        _write(part / PINNED, {})
    _write(part / MANIFEST, {"format": 1, "files": sums | {FACTS: _sum(part / FACTS)}})
    _sync_folder(part)
    aside = place.with_name(f".{place.name}{_ASIDE}")
    if place.exists():
        place.rename(aside)
    part.rename(place)
    _sync_folder(place.parent)
    shutil.rmtree(aside, ignore_errors=True)


def recover(folder: Path) -> None:
    """Clear what a killed writer left; a checkpoint that had stepped aside for one that never came steps back."""
    for left in folder.glob(f".step-*{_ASIDE}"):
        place = folder / left.name.removesuffix(_ASIDE)[1:]
        if place.exists():
            shutil.rmtree(left)
        else:
            left.rename(place)
    for left in folder.glob(f".step-*{_PART}"):
        shutil.rmtree(left)


def remove(path: Path) -> None:
    """Take a checkpoint away: hidden at once, then deleted, so that none is ever there in part."""
    hidden = path.with_name(f".{path.name}{_PART}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def rotate(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep`, and those that are pinned."""
    for old in [path for path in listed(folder) if not (path / PINNED).exists()][keep:]:
        remove(old)


def drop_after(folder: Path, step: int) -> None:
    """Remove the checkpoints beyond `step`."""
    for path in listed(folder):
        if step_of(path) > step:
            remove(path)


def read_manifest(path: Path) -> Sums:
    """The manifest's files; CheckpointError says why it cannot be trusted."""
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files: Sums = content["files"]
        wrong = content["format"] != 1 or not all({"size", "crc32"} <= set(entry) for entry in files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not whole: its {MANIFEST} cannot be read ({error})") from None
    if wrong:
        raise CheckpointError(f"{path}: its {MANIFEST} is of another version")
    return files


def check_files(path: Path, files: Sums, names: Iterable[str]) -> None:
    """Raise CheckpointError unless the named files are there, of their size and unchanged."""
    for name in names:
        file, due = path / name, files[name]
        if not file.is_file():
            raise CheckpointError(f"{path} is not whole: {name} is missing")
        if (size := file.stat().st_size) != due["size"]:
            raise CheckpointError(f"{path} is not whole: {name} has {size} bytes, {due['size']} were written")
        try:
            found = _sum(file)["crc32"]
        except OSError as error:
            raise CheckpointError(f"{path} is not whole: {name} cannot be read ({error})") from None
        if found != due["crc32"]:
            raise CheckpointError(f"{path} is not whole: {name} has changed since it was written")


def read_facts(path: Path) -> dict[str, Any]:
    """What was kept beside the tensors."""
    try:
        facts: dict[str, Any] = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: its {FACTS} cannot be read ({error}): resume from another checkpoint") from None
    return facts


def _write(file: Path, content: dict[str, Any]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk once the folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
