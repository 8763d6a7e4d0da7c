"""Tokenized documents on disk: flat arrays with offsets, memory-mapped, so any piece of any document is one slice.

A store is a folder: `tokens.bin` (uint16 or uint32), `learn.bin` (a byte a token, only where not all are learned),
`offsets.npy`, `origins.npy` (file and row of each document) and `about.json`. It is written under another name and
renamed when whole.

Invariant: `open_store` gives a whole store or None; what a crash or a full disk left behind is never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 2
_PART = 1 << 20


@dataclass(frozen=True, slots=True)
class Store:
    """Documents of one source. `about` has what was counted while it was made, among it the largest id and a sum of
    all tokens, which stays the same wherever the documents lie."""

    folder: Path
    tokens: NDArray[Any]
    learn: NDArray[np.uint8] | None
    offsets: NDArray[np.int64]
    origins: NDArray[np.int64]
    about: dict[str, Any]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def piece(self, document: int, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Ids and which of them are learned, of `count` tokens of a document."""
        begin = int(self.offsets[document]) + start
        ids = self.tokens[begin : begin + count].astype(np.int64)
        learn = np.ones(count, bool) if self.learn is None else self.learn[begin : begin + count].astype(bool)
        return ids, learn

    def origin(self, document: int) -> str:
        """Where a document came from, as in `docs.jsonl:17`."""
        file, row = (int(number) for number in self.origins[document])
        name = self.about["files"][file]
        return f"{name}:{row}" if row else name


@dataclass
class StoreWriter:
    """Appends documents to files in `folder`; `finish` renames it to `target`."""

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
        folder = target.with_name(f".{target.name}.part")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return cls(folder, target, np.uint16 if vocabulary <= 1 << 16 else np.uint32)

    def __post_init__(self) -> None:
        self._tokens = self.opened.enter_context(open(self.folder / "tokens.bin", "wb"))  # noqa: SIM115
        self._learn = self.opened.enter_context(open(self.folder / "learn.bin", "wb"))  # noqa: SIM115
        self._sum = hashlib.blake2b(digest_size=16)

    def add(self, ids: NDArray[Any], learn: NDArray[np.bool_] | None, file: str, row: int) -> None:
        # In parts: a document may be as long as the memory that is left.
        self._sum.update(len(ids).to_bytes(8, "little"))
        for start in range(0, len(ids), _PART):
            part = ids[start : start + _PART]
            self._tokens.write(part.astype(self.dtype).tobytes())
            self._sum.update(part.astype(np.int64).tobytes())
        for start in range(0, len(ids), _PART):
            count = min(_PART, len(ids) - start)
            mask = np.ones(count, np.uint8) if learn is None else learn[start : start + count].astype(np.uint8)
            self._learn.write(mask.tobytes())
            self._sum.update(mask.tobytes())
            self.learned += int(mask.sum())
        self.largest = max(self.largest, int(ids.max()) if len(ids) else -1)
        self.sizes.append(len(ids))
        self.origins.extend((self.files.setdefault(file, len(self.files)), row))

    def finish(self, about: dict[str, Any]) -> None:
        """Everything on disk, then the name: a reader sees a whole store or none."""
        self.opened.close()
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(self.sizes, np.int64))])
        total = int(offsets[-1])
        np.save(self.folder / "offsets.npy", offsets)
        np.save(self.folder / "origins.npy", np.array(self.origins, np.int64).reshape(-1, 2))
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
        }
        (self.folder / "about.json").write_text(json.dumps(facts | about), encoding="utf-8")
        for file in self.folder.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        shutil.rmtree(self.target, ignore_errors=True)
        os.rename(self.folder, self.target)

    def abandon(self) -> None:
        self.opened.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def open_store(folder: Path) -> Store | None:
    """The store in `folder`, mapped into memory; None where it is missing, of another version or not whole."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        if about["version"] != VERSION:
            return None
        tokens = _map(folder / "tokens.bin", np.dtype(about["dtype"]), about["tokens"])
        partly = about["learned"] != about["tokens"]
        learn = _map(folder / "learn.bin", np.dtype(np.uint8), about["tokens"]) if partly else None
        offsets = np.load(folder / "offsets.npy", mmap_mode="r", allow_pickle=False)
        origins = np.load(folder / "origins.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if len(offsets) != about["documents"] + 1 or len(origins) != about["documents"]:
        return None
    return Store(folder, tokens, learn, offsets, origins, about)


def _map(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    if file.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{file} is not whole")
    return np.memmap(file, dtype, "r") if count else np.zeros(0, dtype)
