"""`Checkpoints`: named tensors and a few facts in a folder a step, by torch's distributed checkpointing.

Every rank writes its own shards as safetensors (no pickle is ever read back); any number of ranks reads them again,
each its own part. `save` copies the tensors to host memory and returns; the rest happens in a thread with a process
group of its own. A checkpoint is whole or not there (`manifest.py`), and the last whole one outlives any failure to
write the next: a failure is logged at once and told by `wait`, and the run may go on. Whole means that every byte was summed:
while it was written, or when it was first read (`proven.py`). Only whole checkpoints count when old ones are removed.

Invariant: all ranks make the same calls in the same order, and succeed or fail alike.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.atomic import OVERHEAD, free_bytes
from ithaca.constants import GIB
from ithaca.errors import CheckpointError
from ithaca.mesh import Mesh
from ithaca.quantities import show_bytes
from ithaca.ranks import gather_objects, on_all_ranks, on_rank_0
from ithaca.state.checkpoint import manifest
from ithaca.state.checkpoint.dcp import read_tensors, write_tensors
from ithaca.state.checkpoint.state_tensors import fingerprint, state_tensors
from ithaca.state.checkpoint.verified_files import VerifiedFiles

__all__ = ["Checkpoints", "fingerprint", "state_tensors"]

logger = logging.getLogger("ithaca")


@dataclass(eq=False, slots=True)
class _Writing:
    """A checkpoint on its way to the disk."""

    step: int
    thread: threading.Thread | None = None
    failure: CheckpointError | None = None


class Checkpoints:
    """The checkpoints of one run. `keep`: how many are kept besides pinned ones. Every rank makes one, at the start.

    `background`: write while training goes on, from a copy in host memory; where there is no room for the copy, and
    where it is False, `save` returns when all is written.
    """

    def __init__(self, folder: Path, keep: int, mesh: Mesh, background: bool) -> None:
        self.folder = folder
        self.keep = keep
        self.background = background
        self._mesh = mesh
        self._group = dist.new_group(backend="gloo")
        self._writing: _Writing | None = None
        self._proven = VerifiedFiles()
        self._on_rank_0(self._prepare)
        self._check_shared()

    def save(
        self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], *, pin: bool = False, wait: bool = False
    ) -> None:
        """Write a checkpoint of `step`; the tensors may change once this returns. `pin`: never rotated away.

        What failed in the background before has been logged and is not raised here; what fails now, the want of room
        first of all, raises CheckpointError on every rank.
        """
        self._join()
        self._on_rank_0(lambda: _check_room(self.folder, bytes_of(tensors)))
        behind = self.background and not wait and self._fits_host(tensors)
        writing = _Writing(step)
        if not behind:
            self._write(writing, tensors, facts, pin)
            if writing.failure is not None:
                raise writing.failure
            return
        staged = {key: _to_host(tensor) for key, tensor in tensors.items()}
        writing.thread = threading.Thread(
            target=self._write, args=(writing, staged, facts, pin), name=f"checkpoint-{step}", daemon=True
        )
        self._writing = writing
        writing.thread.start()

    def wait(self) -> None:
        """Until the checkpoint in flight is written; raises CheckpointError if it could not be."""
        failure = self._join()
        if failure is not None:
            raise failure

    def latest(self, *, restart: bool = False) -> Path | None:
        """Return the newest whole checkpoint; damaged ones above it are set aside under another name, and said.

        Where there are checkpoints but none is whole, CheckpointError says so; `restart`: all are set aside instead,
        and None is returned.
        """
        self._join()
        whole, damaged = self._survey(1, among=self._listed())
        aside = self._on_rank_0(lambda: [path.name for path in manifest.found_aside(self.folder)])
        if not whole and (damaged or aside) and not restart:
            raise CheckpointError(_none_whole(self.folder, damaged, aside))
        self._on_rank_0(lambda: self._set_aside(damaged))
        return whole[0] if whole else None

    def at(self, step: int) -> Path:
        """Return the checkpoint of `step`, which this run has written; CheckpointError where it is whole no more."""
        self._join()
        path = self.folder / manifest.name_of(step)
        problem = self._check(path)
        if problem is not None:
            raise CheckpointError(f"{problem}: the same command goes on from the last whole checkpoint")
        return path

    def read_facts(self, path: Path) -> dict[str, Any]:
        """What was kept beside the tensors."""
        return manifest.read_facts(path)

    def load(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Read a checkpoint into `tensors`, in place, whatever degrees it was written at.

        Names, shapes and dtypes must be those that were saved: CheckpointError names what differs.
        """
        self._join()
        read_tensors(path, tensors, self._group)

    def drop_after(self, step: int) -> None:
        """Remove checkpoints beyond `step`, for a run that goes on from there on another way."""
        self._join()
        self._on_rank_0(lambda: manifest.drop_after(self.folder, step))

    def _join(self) -> CheckpointError | None:
        writing, self._writing = self._writing, None
        if writing is None or writing.thread is None:
            return None
        writing.thread.join()
        return writing.failure

    def _write(self, writing: _Writing, tensors: dict[str, Tensor], facts: dict[str, Any], pin: bool) -> None:
        """All of a checkpoint but the copy; never raises. Ranks learn of each other's failures at every stage."""
        if self._mesh.device.type == "cuda":
            # A thread starts out on the first device, and would open a context there.
            torch.cuda.set_device(self._mesh.device)
        part = manifest.part_of(self.folder, writing.step)
        try:
            self._on_rank_0(lambda: part.mkdir(parents=True))
            sums = self._on_all_ranks(lambda: write_tensors(part, tensors, self._group))
            files = {name: entry for each in sums for name, entry in each.items()}
            self._on_rank_0(lambda: self._seal(part, writing.step, files, facts, pin))
        except Exception as error:
            writing.failure = CheckpointError(f"the checkpoint of step {writing.step} was not written: {error}")
            if self._mesh.rank == 0:
                logger.error("%s; those before it are untouched", writing.failure)
                shutil.rmtree(part, ignore_errors=True)
            return
        try:
            self._rotate()
        except Exception as error:
            if self._mesh.rank == 0:
                logger.warning("old checkpoints in %s were not removed: %s", self.folder, error)

    def _seal(self, part: Path, step: int, files: manifest.Sums, facts: dict[str, Any], pin: bool) -> None:
        place = self.folder / manifest.name_of(step)
        self._proven.add(place, manifest.seal(part, place, files, {**facts, "step": step}, pin=pin))

    def _rotate(self) -> None:
        """Remove what is older than the `keep` newest whole checkpoints, and set damaged ones among these aside.

        Stages' ends are pinned and do not take part. While fewer than `keep` are whole nothing is removed.
        """
        listed = self._listed(pinned=False)
        whole, damaged = self._survey(self.keep, among=listed)
        oldest = whole[-1] if len(whole) == self.keep else None
        self._on_rank_0(lambda: self._set_aside(damaged))
        if oldest is not None:
            self._on_rank_0(lambda: _remove_all(listed[listed.index(oldest) + 1 :]))

    def _set_aside(self, damaged: dict[Path, str]) -> None:
        for path, problem in damaged.items():
            place = manifest.set_aside(path)
            logger.warning("%s; it is kept as %s and counts no more", problem, place.name)

    def _prepare(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file: a folder for checkpoints is needed")
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest.recover(self.folder)

    def _check_shared(self) -> None:
        """A folder that every node has of its own would hold a part of each checkpoint only."""
        probe = self.folder / f".probe-{self._on_rank_0(lambda: uuid.uuid4().hex)}"
        self._on_rank_0(probe.touch)
        seen = gather_objects(probe.exists(), self._group)
        self._on_rank_0(probe.unlink)
        if not all(seen):
            raise CheckpointError(
                f"{self.folder} is not the same folder for all ranks (rank {seen.index(False)} does not see what rank 0 "
                "writes): name one on a file system that all nodes share"
            )

    def _survey(self, enough: int, among: list[Path]) -> tuple[list[Path], dict[Path, str]]:
        """Go through checkpoints, newest first, until `enough` are whole: these, and why those between are not."""
        whole: list[Path] = []
        damaged: dict[Path, str] = {}
        for path in among:
            problem = self._check(path)
            if problem is None:
                whole.append(path)
            else:
                damaged[path] = problem
            if len(whole) == enough:
                break
        return whole, damaged

    def _check(self, path: Path) -> str | None:
        """Return why a checkpoint is not whole, the same on all ranks.

        The first rank reads the manifest and knows which files were summed before; each rank sums its share of the others.
        """
        problem, files, doubtful = self._on_rank_0(lambda: self._begin_check(path))
        if problem is None and doubtful:
            try:
                manifest.check_files(path, files, doubtful[self._mesh.rank :: self._mesh.world])
            except CheckpointError as error:
                problem = str(error)
            problem = next((said for said in gather_objects(problem, self._group) if said is not None), None)
            if problem is None and self._mesh.rank == 0:
                self._proven.add(path, files)
        return problem

    def _begin_check(self, path: Path) -> tuple[str | None, manifest.Sums, list[str]]:
        try:
            files = manifest.read_manifest(path)
            manifest.check_files(path, files, [manifest.FACTS])
            manifest.check_name(path)
        except CheckpointError as error:
            return str(error), {}, []
        return None, files, self._proven.doubtful(path, files)

    def _listed(self, *, pinned: bool = True) -> list[Path]:
        """Return the checkpoints of the folder as the first rank sees them, newest first; stages' ends if `pinned`."""
        return self._on_rank_0(
            lambda: [path for path in manifest.listed(self.folder) if pinned or not manifest.is_pinned(path)]
        )

    def _fits_host(self, tensors: dict[str, Tensor]) -> bool:
        needed = sum(_local_bytes(tensor) for tensor in tensors.values()) * self._mesh.local_ranks
        fits = all(gather_objects(needed < psutil.virtual_memory().available, self._group))
        if not fits and self._mesh.rank == 0:
            logger.warning("the host has no room for a copy of %.1f GiB: this checkpoint is waited for", needed / GIB)
        return fits

    def _on_rank_0(self, action: Callable[[], Any]) -> Any:
        return on_rank_0(action, self._group, failed=lambda error: CheckpointError(_reason(error)))

    def _on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        who = f"(rank {self._mesh.rank})"
        return on_all_ranks(action, self._group, failed=lambda error: CheckpointError(f"{_reason(error)} {who}"))


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        manifest.remove(path)


def _none_whole(folder: Path, damaged: dict[Path, str], aside: list[str]) -> str:
    """What is said where a run has checkpoints and cannot go on from any."""
    reasons = "; ".join(list(damaged.values())[:3]) or f"{', '.join(aside[:3])} were set aside as damaged"
    count = len(damaged) + len(aside)
    return (
        f"{folder} holds {count} checkpoint{'' if count == 1 else 's'} and none is whole ({reasons}): put a whole one back, "
        "or begin at step 1 with --restart, which deletes none of them"
    )


def bytes_of(tensors: dict[str, Tensor]) -> int:
    """Bytes of a checkpoint: each tensor once, whole."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _check_room(folder: Path, needed: int) -> None:
    free = free_bytes(folder)
    if free < needed * OVERHEAD:
        raise CheckpointError(
            f"a checkpoint needs {show_bytes(needed * OVERHEAD)} and {folder} has {show_bytes(free)} free: make room, "
            "name an output folder on a larger disk, or keep fewer checkpoints"
        )


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes


def _to_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")
