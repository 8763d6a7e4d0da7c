"""Atomic writes: a reader sees a file or a folder whole, or not at all, whatever ends the process or fills the disk.

    write_whole(file, text)                         write        .NAME.part
                                                    rename       .NAME.part -> NAME

    part = part_of(folder)                          write        .NAME.part/...   any number of files
    replace_folder(part, folder, aside)             rename       NAME       -> aside
                                                    rename       .NAME.part -> NAME
                                                    remove       aside

A killed process leaves `.NAME.part` or `aside` behind; the next process clears them. A rename survives a crash of the
machine only after an fsync of the folder: `force_to_disk`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# Factor on the bytes of a file's content, for headers, names and the file system's own blocks.
OVERHEAD = 1.02


def part_of(target: Path) -> Path:
    """Return the hidden path beside `target` where its content is written."""
    return target.with_name(f".{target.name.removeprefix('.')}.part")


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file under another name and rename it; if that fails, the old file stays as it was."""
    part = part_of(file)
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def replace_folder(part: Path, target: Path, aside: Path, *, durable: bool = False) -> None:
    """Rename `part` to `target`; an older `target` waits at `aside` and is removed last.

    `durable`: fsync the names in `part` before the renames, and those in the parent folder after them.
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
    """Remove a folder with its content, a file, or a link without its target; a missing path is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def force_to_disk(path: str | os.PathLike[str]) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def nearest_folder(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that has `folder`, or will have it."""
    return shutil.disk_usage(nearest_folder(folder)).free
