"""`JsonLines`: a file of JSON lines to append to, which never holds a part of a line, even on a full disk.

A write that fails half way is undone, and its lines wait in memory for the next write. A half line of a killed process
is removed with a warning.

Invariant: at the end of every call the file ends with a line break, or is empty.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ithaca.atomic import write_whole
from ithaca.errors import ConfigError

# Most lines that wait for disk space, about a kilobyte each.
_MOST = 20_000
# Bytes read at once in search of the last line's start.
_BLOCK = 1 << 16

logger = logging.getLogger("ithaca")


class JsonLines:
    """One file, to which a single thread appends."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._waiting: deque[bytes] = deque(maxlen=_MOST)
        self._failed = False

    def append(self, line: str) -> None:
        """Write a line after the lines that wait; a failing disk is reported once and raises nothing."""
        self._waiting.append(line.encode() + b"\n")
        many = len(self._waiting)
        try:
            self._write(b"".join(self._waiting))
        except OSError as error:
            if not self._failed:
                logger.warning("%s: lines wait in memory (%s): make room, the run goes on", self.file, error)
            elif many == _MOST:
                logger.warning("%s: more than %d lines wait for room: the oldest is lost", self.file, _MOST)
            self._failed = True
            return
        if self._failed:
            logger.warning("%s goes on: %d lines that waited for room are written", self.file, many)
        self._failed = False
        self._waiting.clear()

    def _write(self, data: bytes) -> None:
        handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            end, written = self._remove_half_line(handle), 0
            try:
                while written < len(data):
                    written += os.write(handle, data[written:])
            except OSError:
                os.ftruncate(handle, end)
                raise
        finally:
            os.close(handle)

    def _remove_half_line(self, handle: int) -> int:
        """Remove an unfinished last line, and return the size of the file."""
        size = os.fstat(handle).st_size
        if not size or os.pread(handle, 1, size - 1) == b"\n":
            return size
        start, tail = size, b""
        while start and b"\n" not in tail:
            start = max(0, start - _BLOCK)
            tail = os.pread(handle, size - start, start)
        last = tail.rpartition(b"\n")[2]
        if record_of(last) is not None:
            os.write(handle, b"\n")
            return size + 1
        logger.warning("%s: its last line had been cut short and is removed", self.file)
        os.ftruncate(handle, size - len(last))
        return size - len(last)

    def keep(self, select: Callable[[dict[str, Any]], bool]) -> None:
        """Keep the records for which `select` is true; remove lines that are no records, with a warning."""
        try:
            data = self.file.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self.file} cannot be read ({error.strerror}): move it away") from None
        records = [(line, record_of(line)) for line in data.split(b"\n") if line]
        broken = sum(record is None for _, record in records)
        kept = b"".join(line + b"\n" for line, record in records if record is not None and select(record))
        if broken:
            lines = "1 line that is no record is" if broken == 1 else f"{broken} lines that are no records are"
            logger.warning("%s: %s removed", self.file, lines)
        if kept == data:
            return
        try:
            if data.startswith(kept):
                # Cutting the end off needs no disk space.
                os.truncate(self.file, len(kept))
            else:
                write_whole(self.file, kept)
        except OSError as error:
            logger.warning("%s keeps lines that do not belong to the run (%s): make room there", self.file, error)


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return the record that a line holds; None for half a line or anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and type(record.get("step")) is int and isinstance(record.get("kind"), str)
    return record if whole else None
