"""Atomic write of a checkpoint: a manifest of files with sizes and checksums, then a rename.

    1. .step-00000300.part/    shards and facts are written, forced to disk and summed
    2. manifest.json           written last
    3. rename                  .step-00000300.part -> step-00000300: no folder of that name is ever incomplete

An older checkpoint of the same name is renamed to a hidden one until the new one is in place. A checkpoint that is
found damaged is renamed to `corrupt-step-...` and never deleted: rotation counts whole ones only.

Invariant: after a kill at any time, `recover` leaves either the old checkpoint or the new one, whole.
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
    """Return the step of a checkpoint's folder."""
    if not _named(path):
        raise CheckpointError(f"{path} is no checkpoint: its name would be like {name_of(200)}")
    return int(path.name.partition("-")[2])


def _named(path: Path) -> bool:
    """True if the name is one that `name_of` writes."""
    found = _NAME.fullmatch(path.name)
    return found is not None and path.name == name_of(int(found[1]))


def part_of(folder: Path, step: int) -> Path:
    """Return the hidden folder that a checkpoint is written into."""
    return atomic.part_of(folder / name_of(step))


def listed(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, newest first, whole or not."""
    try:
        found = [path for path in folder.iterdir() if _named(path) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror}): see to its permissions") from None
    return sorted(found, key=step_of, reverse=True)


def _sum(file: Path) -> dict[str, int]:
    """Return the size and the checksum of a file."""
    total, size = 0, 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            total, size = zlib.crc32(piece, total), size + len(piece)
    return {"size": size, "crc32": total}


def sum_of(data: bytes | memoryview, before: dict[str, int] | None = None) -> dict[str, int]:
    """Return the size and the checksum of bytes that follow those of `before`."""
    before = before or {"size": 0, "crc32": 0}
    return {"size": before["size"] + len(data), "crc32": zlib.crc32(data, before["crc32"])}


def seal(part: Path, path: Path, sums: Sums, facts: dict[str, Any], *, pin: bool) -> Sums:
    """Write facts and manifest, and rename the folder to `path`; return the sums of all its files.

    `sums` are of the bytes that were passed to the file system: a file of another size was not written whole.
    """
    for name, due in sums.items():
        _check_size(part, name, due)
    facts_sum = _write(part / FACTS, facts)
    if pin:
        _write(part / PINNED, {})
    files = sums | {FACTS: facts_sum}
    _write(part / MANIFEST, {"format": 1, "files": files, "pinned": pin, "sum": _own_sum(files)})
    atomic.replace_folder(part, path, path.with_name(f".{path.name}{_ASIDE}"), durable=True)
    return files


def recover(folder: Path) -> None:
    """Remove a killed writer's files; rename an older checkpoint back if its replacement is not whole."""
    for left in folder.glob(f".step-*{_ASIDE}"):
        path = folder / left.name.removesuffix(_ASIDE)[1:]
        if path.exists() and problem_of(path) is None:
            atomic.remove(left)
            continue
        if path.exists():
            set_aside(path)
        left.rename(path)
    for left in (*folder.glob(".step-*.part"), *folder.glob(f"{_PROBE}*")):
        atomic.remove(left)


def remove(path: Path) -> None:
    """Remove a checkpoint: rename it to a hidden name first, so that no half-deleted folder is taken for one."""
    hidden = atomic.part_of(path)
    atomic.remove(hidden)
    path.rename(hidden)
    atomic.remove(hidden)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to `corrupt-...`; return the new path."""
    number, aside = 1, path.with_name(_CORRUPT + path.name)
    while aside.exists() or aside.is_symlink():
        number += 1
        aside = path.with_name(f"{_CORRUPT}{path.name}-{number}")
    path.rename(aside)
    return aside


def found_aside(folder: Path) -> list[Path]:
    """Return the damaged checkpoints of a folder that were set aside."""
    return sorted(path for path in folder.glob(f"{_CORRUPT}step-*") if path.is_dir())


def is_pinned(path: Path) -> bool:
    """True for a stage's end, which is never rotated away; a marker file and the manifest both say so."""
    if (path / PINNED).exists():
        return True
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8"))["pinned"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_manifest(path: Path) -> Sums:
    """Return the manifest's files; raise CheckpointError if the manifest cannot be trusted."""
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files: Sums = content["files"]
        other = content["format"] != 1
        sound = FACTS in files and all(_is_entry(name, entry) for name, entry in files.items())
        own = content.get("sum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not whole: its {MANIFEST} cannot be read ({error})") from None
    if other:
        raise CheckpointError(f"{path}: its {MANIFEST} is of another version")
    if not sound or own not in (None, _own_sum(files)):
        raise CheckpointError(f"{path} is not whole: its {MANIFEST} has changed since it was written")
    return files


def _is_entry(name: str, entry: Any) -> bool:
    """True for a file name without folders, with a size and a checksum."""
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
    """Raise CheckpointError if the folder's name has another step than its facts."""
    step = read_facts(path).get("step")
    if step != step_of(path):
        raise CheckpointError(
            f"{path} is not whole: its {FACTS} is of step {step}, so the folder was renamed or copied"
        )


def problem_of(path: Path) -> str | None:
    """Return the problem of a damaged checkpoint, after reading every byte; None if it is whole."""
    try:
        files = read_manifest(path)
        check_files(path, files, files)
        check_name(path)
    except CheckpointError as error:
        return str(error)
    return None


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts that were saved beside the tensors."""
    try:
        facts: Any = json.loads((path / FACTS).read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError(f"it holds a {type(facts).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its {FACTS} cannot be read ({error}): resume from another checkpoint") from None
    return facts


def _write(file: Path, content: dict[str, Any]) -> dict[str, int]:
    """Write JSON and force it to disk; return its size and checksum."""
    data = json.dumps(content, indent=1, sort_keys=True).encode()
    file.write_bytes(data)
    atomic.force_to_disk(file)
    return sum_of(data)
