"""Tensors of all ranks into one folder and back, by torch's distributed checkpointing (DCP) over safetensors.

DCP plans the pieces that each rank writes (copies are written once) and the pieces that a rank of another world
reads. Its storage in Hugging Face's format is used, whose metadata are the files' headers: no pickle is read.

Files are summed while they are written, and only files that the manifest names are read.

Invariant: a tensor is written and read without any change of dtype or value.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ithaca.atomic import force_to_disk
from ithaca.errors import CheckpointError
from ithaca.ranks import gather_objects
from ithaca.state.checkpoint.low_bit_moments import BY_SHARD
from ithaca.state.checkpoint.manifest import Sums, read_manifest, sum_of

# Bytes of a file. DCP builds a file in memory before it writes it, so a rank holds this much twice.
_FILE = 512 * 2**20
_NAMED = 5


class _SavePlanner(DefaultSavePlanner):
    """Save planner with flat names; a rank with an empty shard of a tensor writes nothing."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.tensor_data is None or item.tensor_data.chunk.sizes.numel()]
        self.plan = SavePlan(items)
        return self.plan


class _SummedStream:
    """File open for writing, with the checksum of the written bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.sum = stream, sum_of(b"")

    def write(self, data: bytes) -> int:
        self.sum = sum_of(data, self.sum)
        written: int = self._stream.write(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _SummedFiles(FileSystem):
    """DCP's file system, with the checksum of each file that it writes. Checked with torch 2.9 to 2.13."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = _SummedStream(stream)
            yield summed
        # DCP calls fsync itself, but while the end of a file may still be in the stream's buffer.
        force_to_disk(path)
        self.sums[Path(path).name] = summed.sum


class _NamedFiles(FileSystem):
    """DCP's file system, listing only the files that a manifest names."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [file for file in super().ls(path) if Path(file).name in self.names]


class _TextErrorWriter(HuggingFaceStorageWriter):
    """Storage writer that raises CheckpointError with the message of any error.

    DCP pickles exceptions for rank 0, and an exception that cannot be pickled would leave rank 0 waiting.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise CheckpointError(str(error) or type(error).__name__) from None


def write_tensors(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> Sums:
    """Write this rank's part of `tensors` into `folder`, forced to disk; every rank of `group` calls this.

    Return this rank's files with size and checksum.
    """
    writer = _TextErrorWriter(str(folder), fqn_to_index_mapping=_filed(tensors, group), save_distributed=True)
    writer.fs = files = _SummedFiles()
    _run(lambda: dcp.save(dict(tensors), storage_writer=writer, planner=_SavePlanner(), process_group=group))
    own = f"shard-{dist.get_rank(group) + 1:05d}-"
    assert files.sums.keys() == {path.name for path in folder.iterdir() if path.name.startswith(own)}, files.sums
    return files.sums


def _reader(folder: Path) -> tuple[HuggingFaceStorageReader, Metadata]:
    """Return a reader of a checkpoint's own files, and the metadata of their headers."""
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _NamedFiles(set(read_manifest(folder)))
    try:
        return reader, reader.read_metadata()
    except Exception as error:
        # A damaged header raises errors of safetensors, of JSON or of torch.
        raise CheckpointError(f"{folder} cannot be read ({error}): resume from another checkpoint") from None


def _filed(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, int]:
    """Return the number of the file that each tensor goes to, the same on all ranks; a file is about `_FILE` bytes."""
    world = dist.get_world_size(group)
    shares = {key: tensor.numel() * tensor.element_size() // world for key, tensor in tensors.items()}
    if any(BY_SHARD in key for key in shares):
        shares = {key: share for each in gather_objects(shares, group) for key, share in each.items()}
    files: dict[str, int] = {}
    number, filled = 1, 0
    for key in sorted(shares):
        if filled and filled + shares[key] > _FILE:
            number, filled = number + 1, 0
        files[key] = number
        filled += shares[key]
    return files


def read_tensors(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Read this rank's part of `tensors` from `folder`, in place; every rank of `group` calls this."""
    reader, metadata = _reader(folder)
    _check(folder, metadata, tensors)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    found = dict(tensors)
    _run(lambda: dcp.load(found, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None))


class CheckpointTensors:
    """Tensors of a checkpoint, assembled one at a time without a process group."""

    def __init__(self, folder: Path) -> None:
        metadata: Any = _reader(folder)[1]
        self.tensors: dict[str, TensorStorageMetadata] = metadata.state_dict_metadata
        self._pieces: dict[str, list[tuple[Any, str]]] = {}
        for index, info in metadata.storage_data.items():
            self._pieces.setdefault(index.fqn, []).append((index.offset, info.relative_path))

    def whole(self, key: str) -> Tensor:
        """Return the whole tensor `key`, on the host."""
        from safetensors import safe_open

        meta = self.tensors[key]
        tensor = torch.empty(meta.size, dtype=meta.properties.dtype)
        for offset, file in self._pieces[key]:
            with safe_open(file, framework="pt") as handle:
                piece = handle.get_tensor(key)
            tensor[tuple(slice(at, at + size) for at, size in zip(offset, piece.shape, strict=True))] = piece
        return tensor


def _check(folder: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Refuse other names, shapes or dtypes than the run's, before anything is overwritten."""
    saved: Any = metadata.state_dict_metadata
    missing = sorted(tensors.keys() - saved.keys())
    # 8-bit moments saved shard by shard have a name for each shard, and a rank reads only its own.
    unexpected = sorted(key for key in saved.keys() - tensors.keys() if BY_SHARD not in key)
    if any(BY_SHARD in key or key.endswith((".codes", ".scale")) for key in missing + unexpected):
        raise CheckpointError(
            f"{folder}: 8-bit moments such as {(missing + unexpected)[0]} were cut into other blocks at the degrees it was "
            "written at: resume with as many processes as then, or with optimizer.name 'adamw' from an export"
        )
    _refuse(folder, "does not hold", missing)
    _refuse(folder, "holds, unlike this run,", unexpected)
    wrong = [
        f"{key} as {_described(saved[key].size, saved[key].properties.dtype)} for {_described(tensor.shape, tensor.dtype)}"
        for key, tensor in tensors.items()
        if saved[key].size != tensor.shape or saved[key].properties.dtype != tensor.dtype
    ]
    _refuse(folder, "holds", wrong)


def _described(shape: Any, dtype: Any) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _refuse(folder: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise CheckpointError(
            f"{folder} {what} {', '.join(names[:_NAMED])}{more}: resume with the model, optimizer and precision it was "
            "made with, or name another output folder"
        )


def _run(action: Any) -> None:
    """Run a DCP action; raise the first rank's failure as CheckpointError of one line."""
    try:
        action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"{str(cause) or type(cause).__name__} (rank {rank})") from cause
