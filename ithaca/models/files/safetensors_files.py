"""Safetensors files: the position of every tensor in a folder, reading of ranges, and writing of whole tensors.

    model-00001-of-00002.safetensors    8 bytes of length, a JSON header, the tensors' bytes
    model.safetensors.index.json        which tensor is in which file, where there are several

Headers are read first, and a damaged or incomplete file is refused then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ithaca.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Bytes that are read before a file is closed and opened again: its mapped pages count as this process's memory until then.
_MAPPED = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Header:
    """One tensor of a file; `dtype` by safetensors' name, `start` and `end` in bytes of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int


Headers = dict[str, Header]


def read_headers(folder: Path) -> Headers:
    """Return every tensor of the folder's safetensors by its name."""
    return {key: header for file in weight_files(folder) for key, header in headers_of(file).items()}


def headers_of(file: Path) -> Headers:
    """Return every tensor of one file by its name."""
    try:
        # Opening checks that the header is whole and that the file has all the bytes that it names.
        with safe_open(str(file), framework="pt"), file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            content = json.loads(opened.read(size))
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from None
    content.pop("__metadata__", None)
    return {
        key: Header(file, tuple(about["shape"]), about["dtype"], *(8 + size + at for at in about["data_offsets"]))
        for key, about in content.items()
    }


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the folder's weights."""
    if (folder / INDEX).is_file():
        try:
            named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(folder / INDEX, error) from None
        files = [folder / name for name in sorted(set(named))]
        if any(file.parent != folder for file in files):
            raise CheckpointError(f"{folder / INDEX} names files outside its folder: copy it anew")
    else:
        files = [folder / SINGLE]
    for file in files:
        if file.is_file():
            continue
        if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
            raise CheckpointError(
                f"{folder} has its weights as pickles, which can run code: convert them to safetensors (transformers' "
                "save_pretrained writes them), or name a revision that has them"
            )
        raise CheckpointError(f"{folder} has no {file.name}: weights as safetensors are needed")
    return files


@dataclass(slots=True)
class TensorReader:
    """Reader of tensors that keeps files open, until `_MAPPED` bytes are read."""

    headers: Headers
    opened: dict[Path, Any] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)
    mapped: int = 0

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def whole(self, key: str) -> Tensor:
        """Return a tensor, in the file's own pages."""
        return self.part(key, tuple(slice(0, size) for size in self.headers[key].shape))

    def part(self, key: str, where: Iterable[slice]) -> Tensor:
        """Return a range of a tensor, in the file's own pages."""
        where = tuple(where)
        handle = self._open(self.headers[key].file)
        # safetensors has no slice of a tensor without dims.
        read: Tensor = handle.get_slice(key)[where] if where else handle.get_tensor(key)
        if self.mapped and self.mapped + read.nbytes > _MAPPED:
            del read
            self.close()
            return self.part(key, where)
        self.mapped += read.nbytes
        return read

    def close(self) -> None:
        """Close all files; tensors that were read keep their pages."""
        self.opened.clear()
        self.stack.close()
        self.mapped = 0

    def _open(self, file: Path) -> Any:
        if file not in self.opened:
            try:
                self.opened[file] = self.stack.enter_context(safe_open(str(file), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise _unreadable(file, error) from None
        return self.opened[file]


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} cannot be read ({error}): copy it anew")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file of whole tensors, with transformers' metadata."""
    with modes_of_umask(path.parent, (path.name,)):
        # A tensor may be a view of a fused one; safetensors stores contiguous tensors only.
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata={"format": "pt"})


@contextmanager
def modes_of_umask(folder: Path, names: tuple[str, ...] = ("*.safetensors",)) -> Iterator[None]:
    """Give files that are written inside the context the usual mode; safetensors 0.8 leaves them at 600."""
    folder.mkdir(parents=True, exist_ok=True)
    # The umask cannot be read without changing it for other threads, so a probe file shows the mode.
    probe = folder / ".mode.part"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    yield
    for name in names:
        for file in folder.glob(name):
            file.chmod(mode)
