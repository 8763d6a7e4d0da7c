"""What makes a checkpoint whole: a manifest of its files with sizes and checksums, and a rename.

A checkpoint is written into a hidden folder beside its place. When every file is on the disk and summed, the manifest
is written and the folder is renamed, which either happens or does not: at no moment is there a folder of that name
that is not whole. A checkpoint of the same name steps aside under a hidden name until the new one is in place.

A checkpoint that is found damaged is set aside under another name (`corrupt-step-...`) and never deleted: rotation counts
whole ones only.

Invariant: what `recover` leaves after any kill is either the old checkpoint or the new one, whole.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ithaca import atomic
from ithaca.errors import CheckpointError

MANIFEST = "manifest.json"
FACTS = "facts.json"
PINNED = "pinned"
_NAME = re.compile(r"step-([0-9]{8,15})")
_ASIDE = ".aside"
_CORRUPT = "corrupt-"
_PROBE = ".probe-"
_PIECE = 16 * 2**20

Sums = dict[str, dict[str, int]]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    if not _named(path):
        raise CheckpointError(f"{path} is no checkpoint: its name would be like {name_of(200)}")
    return int(path.name.partition("-")[2])


def _named(path: Path) -> bool:
    """True for `step-` and a number as `name_of` writes it."""
    found = _NAME.fullmatch(path.name)
    return found is not None and path.name == name_of(int(found[1]))


def part_of(folder: Path, step: int) -> Path:
    """The hidden folder that a checkpoint is written into."""
    return atomic.part_of(folder / name_of(step))


def listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first, whole or not."""
    try:
        found = [path for path in folder.iterdir() if _named(path) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror}): see to its permissions") from None
    return sorted(found, key=step_of, reverse=True)


def _sum(file: Path) -> dict[str, int]:
    """Size and checksum of a file, read once."""
    total, size = 0, 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            total, size = zlib.crc32(piece, total), size + len(piece)
    return {"size": size, "crc32": total}


def sum_of(data: bytes | memoryview, before: dict[str, int] | None = None) -> dict[str, int]:
    """The same of bytes on their way to a file, after those that `before` is of."""
    before = before or {"size": 0, "crc32": 0}
    return {"size": before["size"] + len(data), "crc32": zlib.crc32(data, before["crc32"])}


def seal(part: Path, place: Path, sums: Sums, facts: dict[str, Any], *, pin: bool) -> Sums:
    """Write facts and manifest, and put the folder in its place; returns the sums of all its files.

    `sums` are of the bytes that were handed to the file system: a file of another size was not written whole.
    """
    for name, due in sums.items():
        _check_size(part, name, due)
    facts_sum = _write(part / FACTS, facts)
    if pin:
        _write(part / PINNED, {})
    files = sums | {FACTS: facts_sum}
    _write(part / MANIFEST, {"format": 1, "files": files, "pinned": pin, "sum": _own_sum(files)})
    atomic.replace_folder(part, place, place.with_name(f".{place.name}{_ASIDE}"), durable=True)
    return files


def recover(folder: Path) -> None:
    """Clear what a killed writer left; a checkpoint that had stepped aside for one that never came steps back."""
    for left in folder.glob(f".step-*{_ASIDE}"):
        place = folder / left.name.removesuffix(_ASIDE)[1:]
        if place.exists() and problem_of(place) is None:
            atomic.remove(left)
            continue
        if place.exists():
            set_aside(place)
        left.rename(place)
    for left in (*folder.glob(".step-*.part"), *folder.glob(f"{_PROBE}*")):
        atomic.remove(left)


def remove(path: Path) -> None:
    """Take a checkpoint away: hidden at once, then deleted, so that none is ever there in part."""
    hidden = atomic.part_of(path)
    atomic.remove(hidden)
    path.rename(hidden)
    atomic.remove(hidden)


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint a name under which it is no checkpoint any more; returns that place."""
    number, place = 1, path.with_name(_CORRUPT + path.name)
    while place.exists() or place.is_symlink():
        number += 1
        place = path.with_name(f"{_CORRUPT}{path.name}-{number}")
    path.rename(place)
    return place


def found_aside(folder: Path) -> list[Path]:
    """The damaged checkpoints that were set aside in a folder."""
    return sorted(path for path in folder.glob(f"{_CORRUPT}step-*") if path.is_dir())


def is_pinned(path: Path) -> bool:
    """True for a stage's end, which is never rotated away; known from either of two places."""
    if (path / PINNED).exists():
        return True
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8"))["pinned"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


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
        other = content["format"] != 1
        sound = FACTS in files and all(_plain(name, entry) for name, entry in files.items())
        own = content.get("sum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not whole: its {MANIFEST} cannot be read ({error})") from None
    if other:
        raise CheckpointError(f"{path}: its {MANIFEST} is of another version")
    if not sound or own not in (None, _own_sum(files)):
        raise CheckpointError(f"{path} is not whole: its {MANIFEST} has changed since it was written")
    return files


def _plain(name: str, entry: Any) -> bool:
    """True for a file of the folder itself, with the two numbers that are held against it."""
    numbers = [entry["size"], entry["crc32"]]
    return name == Path(name).name and name not in ("", ".", "..") and all(type(number) is int for number in numbers)


def _own_sum(files: Sums) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def check_files(path: Path, files: Sums, names: Iterable[str]) -> None:
    """Raise CheckpointError unless the named files are there, of their size and unchanged."""
    for name in names:
        due = files[name]
        _check_size(path, name, due)
        try:
            found = _sum(path / name)["crc32"]
        except OSError as error:
            raise CheckpointError(f"{path} is not whole: {name} cannot be read ({error})") from None
        if found != due["crc32"]:
            raise CheckpointError(f"{path} is not whole: {name} has changed since it was written")


def _check_size(path: Path, name: str, due: dict[str, int]) -> None:
    try:
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is not whole: {name} is missing")
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} is not whole: {name} cannot be read ({error})") from None
    if size != due["size"]:
        raise CheckpointError(f"{path} is not whole: {name} has {size} bytes, {due['size']} were written")


def check_name(path: Path) -> None:
    """Raise CheckpointError where the folder is called by another step than the one it was written at."""
    step = read_facts(path).get("step")
    if step != step_of(path):
        raise CheckpointError(
            f"{path} is not whole: its {FACTS} is of step {step}, so the folder was renamed or copied"
        )


def problem_of(path: Path) -> str | None:
    """Why a checkpoint is not whole, every byte of it read by this process; None where it is."""
    try:
        files = read_manifest(path)
        check_files(path, files, files)
        check_name(path)
    except CheckpointError as error:
        return str(error)
    return None


def read_facts(path: Path) -> dict[str, Any]:
    """What was kept beside the tensors."""
    try:
        facts: Any = json.loads((path / FACTS).read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError(f"it holds a {type(facts).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its {FACTS} cannot be read ({error}): resume from another checkpoint") from None
    return facts


def _write(file: Path, content: dict[str, Any]) -> dict[str, int]:
    """Write JSON onto the disk; returns its size and checksum."""
    data = json.dumps(content, indent=1, sort_keys=True).encode()
    file.write_bytes(data)
    atomic.force_to_disk(file)
    return sum_of(data)
