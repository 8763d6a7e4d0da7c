"""Atomic writes: a file or a folder is there whole or not at all, whatever ends the process or fills the disk.

    write_whole(file, text)                        # .NAME.part, then a rename
    write(part_of(folder))                         # any number of files ...
    replace_folder(part_of(folder), folder, aside) # ... which become the folder at once

A rename happens or does not. It is on the disk only once its folder is: `force_to_disk`, for what must outlive the
machine. What a killed process leaves is a `.NAME.part`, or a folder that had stepped aside; the next one clears it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# What a file takes beside its content: headers, names and the file system's own needs.
OVERHEAD = 1.02


def part_of(target: Path) -> Path:
    """Return the hidden place beside `target` where it is written."""
    return target.with_name(f".{target.name.removeprefix('.')}.part")


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file beside its place and rename it; where that fails the old file stays as it was."""
    part = part_of(file)
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def replace_folder(part: Path, target: Path, aside: Path, *, durable: bool = False) -> None:
    """Rename `part` to `target`; a folder of that name stands at `aside` until the new one is in place, and then goes.

    `durable`: the names in both folders are forced onto the disk, in this order.
    """
    if durable:
        force_to_disk(part)
    if target.exists():
        target.rename(aside)
    part.rename(target)
    if durable:
        force_to_disk(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder with its content, or a file; of a link, the link alone. What is not there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def force_to_disk(path: str | os.PathLike[str]) -> None:
    """Return when a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def nearest_folder(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def free_bytes(folder: Path) -> int:
    """Return the bytes that the disk has free where `folder` is, or will be."""
    return shutil.disk_usage(nearest_folder(folder)).free
