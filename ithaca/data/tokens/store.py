"""Tokenized documents on disk as flat arrays, memory-mapped, so that any piece of a document is one slice.

    about.json    counts, checksums, names of files; written last
    tokens.bin    uint16 or uint32     | doc 0 | doc 1    | doc 2 |
    learn.bin     uint8, loss mask     | 0001111 | ...              only if not all tokens are learned
    offsets.npy   int64                0       7          18      24
    origins.npy   int64                file and row of each document

Invariant: `open_store` returns a whole store or None: the folder is renamed once it is whole, so a crash or a full disk
leaves none. Later damage is detected: small files have a checksum that is compared when a store is opened, each block
of tokens (`_BLOCK` bytes) one that is compared when it is first read. So opening costs the same at any size.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ithaca.atomic import force_to_disk, part_of
from ithaca.errors import DataError

VERSION = 2
# Bytes that one checksum covers: a row of a million tokens has a few blocks, and each takes a millisecond.
_BLOCK = 1 << 20
# Tokens of a long document written at a time.
_CHUNK = 1 << 20
_SMALL = ("offsets.npy", "origins.npy")


@dataclass(slots=True)
class CheckedFile:
    """Memory-mapped file, each block of which is compared with its checksum when it is first read."""

    file: Path
    values: NDArray[Any]
    sums: list[int] | None
    seen: set[int] = field(default_factory=set)

    def __getitem__(self, piece: slice) -> NDArray[Any]:
        found: NDArray[Any] = self.values[piece]
        if self.sums is not None and len(found):
            size = self.values.itemsize
            first, last = piece.start * size // _BLOCK, ((piece.start + len(found)) * size - 1) // _BLOCK
            for block in range(first, last + 1):
                if block not in self.seen:
                    self._check(block, self.sums)
        return found

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the whole content, checked, for numpy's functions."""
        return np.asarray(self[0 : len(self)], dtype)

    def _check(self, block: int, sums: list[int]) -> None:
        per_block = _BLOCK // self.values.itemsize
        content = self.values[block * per_block : (block + 1) * per_block]
        if zlib.crc32(content.tobytes()) != sums[block]:
            raise DataError(
                f"{self.file} has changed since it was written (a failing disk?): delete the folder {self.file.parent}, and "
                "the next start makes it again from the documents"
            )
        self.seen.add(block)


def _block_sums(file: Path) -> list[int]:
    with file.open("rb") as stream:
        return [zlib.crc32(block) for block in iter(lambda: stream.read(_BLOCK), b"")]


def _sum_of(about: Mapping[str, Any]) -> int:
    """Return a checksum of about.json's content."""
    return zlib.crc32(json.dumps({key: about[key] for key in sorted(about) if key != "check"}).encode())


@dataclass(frozen=True, slots=True)
class Store:
    """Documents of one source. `about`: counts, the largest id, and a checksum of all tokens that no path goes into."""

    folder: Path
    tokens: CheckedFile
    learn: CheckedFile | None
    offsets: NDArray[np.int64]
    origins: NDArray[np.int64]
    about: dict[str, Any]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def piece(self, document: int, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return ids and loss mask of `count` tokens of a document."""
        begin = int(self.offsets[document]) + start
        ids = self.tokens[begin : begin + count].astype(np.int64)
        learn = np.ones(count, bool) if self.learn is None else self.learn[begin : begin + count].astype(bool)
        return ids, learn

    def origin(self, document: int) -> str:
        """Return a document's file and row, as in `docs.jsonl:17`."""
        file, row = (int(number) for number in self.origins[document])
        name = self.about["files"][file]
        return f"{name}:{row}" if row else name


@dataclass
class StoreWriter:
    """Writer of a store: documents are appended, then `finish` renames the folder, or `abandon` removes it."""

    folder: Path
    target: Path
    dtype: type[np.generic]
    files: dict[str, int] = field(default_factory=dict)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    origins: array[int] = field(default_factory=lambda: array("q"))
    learned: int = 0
    largest: int = -1
    opened: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def start(cls, target: Path, vocabulary: int) -> StoreWriter:
        """Begin a store in a hidden folder beside `target`. `vocabulary`: one more than the largest id."""
        folder = part_of(target)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return cls(folder, target, np.uint16 if vocabulary <= 1 << 16 else np.uint32)

    def __post_init__(self) -> None:
        self._tokens = self.opened.enter_context(open(self.folder / "tokens.bin", "wb"))  # noqa: SIM115
        self._learn = self.opened.enter_context(open(self.folder / "learn.bin", "wb"))  # noqa: SIM115
        self._sum = hashlib.blake2b(digest_size=16)

    def add(self, ids: NDArray[Any], learn: NDArray[np.bool_] | None, file: str, row: int) -> None:
        """Append a document. `learn`: its loss mask, None if all tokens are learned."""
        # In chunks: a copy of a whole document may not fit into memory.
        self._sum.update(len(ids).to_bytes(8, "little"))
        for start in range(0, len(ids), _CHUNK):
            part = ids[start : start + _CHUNK]
            self._tokens.write(part.astype(self.dtype).tobytes())
            self._sum.update(part.astype(np.int64).tobytes())
        for start in range(0, len(ids), _CHUNK):
            count = min(_CHUNK, len(ids) - start)
            mask = np.ones(count, np.uint8) if learn is None else learn[start : start + count].astype(np.uint8)
            self._learn.write(mask.tobytes())
            self._sum.update(mask.tobytes())
            self.learned += int(mask.sum())
        self.largest = max(self.largest, int(ids.max()) if len(ids) else -1)
        self.sizes.append(len(ids))
        self.origins.extend((self.files.setdefault(file, len(self.files)), row))

    def finish(self, about: dict[str, Any]) -> None:
        """Sync all files to disk, then rename the folder: a reader sees a whole store or none."""
        self.opened.close()
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(self.sizes, np.int64))])
        total = int(offsets[-1])
        np.save(self.folder / "offsets.npy", offsets)
        np.save(self.folder / "origins.npy", np.array(self.origins, np.int64).reshape(-1, 2))
        # Plain text needs no mask on disk.
        if self.learned == total:
            (self.folder / "learn.bin").unlink()
        facts = {
            "version": VERSION,
            "dtype": np.dtype(self.dtype).name,
            "documents": len(self.sizes),
            "tokens": total,
            "learned": self.learned,
            "largest": self.largest,
            "sum": self._sum.hexdigest(),
            "files": list(self.files),
            "blocks": {
                name: _block_sums(self.folder / name) for name in sorted(file.name for file in self.folder.iterdir())
            },
        }
        # Through JSON first, so that the checksum is over what a reader gets: tuples become lists.
        content = json.loads(json.dumps(facts | about))
        (self.folder / "about.json").write_text(json.dumps(content | {"check": _sum_of(content)}), encoding="utf-8")
        for file in self.folder.iterdir():
            force_to_disk(file)
        # An older store of this name is damaged or outdated: otherwise it would have been opened.
        shutil.rmtree(self.target, ignore_errors=True)
        self.folder.rename(self.target)

    def abandon(self) -> None:
        """Remove what was written."""
        self.opened.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def open_store(folder: Path) -> Store | None:
    """Open the store in `folder`; None if it is missing, of another version or not whole."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        # Stores of earlier versions have no checksums.
        if about["version"] != VERSION or about.get("check", _sum_of(about)) != _sum_of(about):
            return None
        blocks = about.get("blocks")
        tokens = _map(folder / "tokens.bin", np.dtype(about["dtype"]), about["tokens"], blocks)
        partly = about["learned"] != about["tokens"]
        learn = _map(folder / "learn.bin", np.dtype(np.uint8), about["tokens"], blocks) if partly else None
        if blocks is not None and any(_block_sums(folder / name) != blocks[name] for name in _SMALL):
            return None
        offsets, origins = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in _SMALL)
    # A damaged JSON or npy file may raise any of these.
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if len(offsets) != about["documents"] + 1 or len(origins) != about["documents"]:
        return None
    return Store(folder, tokens, learn, offsets, origins, about)


def _map(file: Path, dtype: np.dtype[Any], count: int, blocks: dict[str, list[int]] | None) -> CheckedFile:
    if file.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{file} is not whole")
    values = np.memmap(file, dtype, "r") if count else np.zeros(0, dtype)
    return CheckedFile(file, values, None if blocks is None else blocks[file.name])
