"""Sharded checkpoints: named tensors and a few facts, a folder for each step, written in the background.

    checkpoints/
      .step-00000300.part/          being written; removed after a kill
      step-00000200/                manifest.json, facts.json, shard-00001-model-....safetensors, ...
      step-00000100/                a stage's end: `pinned`, never rotated away
      corrupt-step-00000150/        damaged, set aside, never deleted

Every rank writes its own shards as safetensors (no pickle is ever read); any number of ranks can read them, each its own
part. `save` copies the tensors to host memory and returns; a thread with a process group of its own writes them. A
checkpoint is whole or not there (`manifest.py`). A failed write is logged at once and raised by `wait`, and the last
whole checkpoint stays. Whole means that all bytes have been summed, while they were written or when they were first
read (`verified_files.py`). Only whole checkpoints count when old ones are removed.

Invariant: all ranks make the same calls in the same order, and succeed or fail together.
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
    """Checkpoint that is being written."""

    step: int
    thread: threading.Thread | None = None
    failure: CheckpointError | None = None


class Checkpoints:
    """Checkpoints of one run; every rank makes the object, at the start. `keep`: number kept besides pinned ones.

    `background`: write from a copy in host memory while training continues. If False, or if the host has no memory for
    the copy, `save` returns when everything is written.
    """

    def __init__(self, folder: Path, keep: int, mesh: Mesh, background: bool) -> None:
        self.folder = folder
        self.keep = keep
        self.background = background
        self._mesh = mesh
        self._group = dist.new_group(backend="gloo")
        self._writing: _Writing | None = None
        self._verified = VerifiedFiles()
        self._on_rank_0(self._prepare)
        self._check_shared()

    def save(
        self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], *, pin: bool = False, wait: bool = False
    ) -> None:
        """Write a checkpoint of `step`; the tensors may change once this returns. `pin`: never rotated away.

        An earlier failure in the background has been logged and is not raised here. A failure now, such as too little
        free disk, raises CheckpointError on every rank.
        """
        self._join()
        self._on_rank_0(lambda: _check_room(self.folder, bytes_of(tensors)))
        in_background = self.background and not wait and self._fits_host(tensors)
        writing = _Writing(step)
        if not in_background:
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
        """Wait until the running write ends; raise CheckpointError if the write failed."""
        failure = self._join()
        if failure is not None:
            raise failure

    def latest(self, *, restart: bool = False) -> Path | None:
        """Return the newest whole checkpoint, None if there is none; set newer, damaged ones aside and log them.

        If there are checkpoints but none is whole, raise CheckpointError; with `restart` set all aside and return None.
        """
        self._join()
        whole, damaged = self._survey(1, among=self._listed())
        aside = self._on_rank_0(lambda: [path.name for path in manifest.found_aside(self.folder)])
        if not whole and (damaged or aside) and not restart:
            raise CheckpointError(_none_whole(self.folder, damaged, aside))
        self._on_rank_0(lambda: self._set_aside(damaged))
        return whole[0] if whole else None

    def at(self, step: int) -> Path:
        """Return the checkpoint of `step`, which this run has written; raise CheckpointError if it is damaged."""
        self._join()
        path = self.folder / manifest.name_of(step)
        problem = self._check(path)
        if problem is not None:
            raise CheckpointError(f"{problem}: the same command goes on from the last whole checkpoint")
        return path

    def read_facts(self, path: Path) -> dict[str, Any]:
        """Return the facts that were saved beside the tensors."""
        return manifest.read_facts(path)

    def load(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Read a checkpoint of any number of ranks into `tensors`, in place.

        Names, shapes and dtypes must be those that were saved: CheckpointError names what differs.
        """
        self._join()
        read_tensors(path, tensors, self._group)

    def _join(self) -> CheckpointError | None:
        writing, self._writing = self._writing, None
        if writing is None or writing.thread is None:
            return None
        writing.thread.join()
        return writing.failure

    def _write(self, writing: _Writing, tensors: dict[str, Tensor], facts: dict[str, Any], pin: bool) -> None:
        """Write a checkpoint from host memory; never raises. Ranks exchange failures after every stage."""
        if self._mesh.device.type == "cuda":
            # A new thread's current device is the first GPU, on which it would create a context.
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
        path = self.folder / manifest.name_of(step)
        self._verified.add(path, manifest.seal(part, path, files, {**facts, "step": step}, pin=pin))

    def _rotate(self) -> None:
        """Remove checkpoints older than the `keep` newest whole ones; set damaged ones among those aside.

        Pinned checkpoints (stages' ends) are not counted. While fewer than `keep` are whole nothing is removed.
        """
        listed = self._listed(pinned=False)
        whole, damaged = self._survey(self.keep, among=listed)
        oldest = whole[-1] if len(whole) == self.keep else None
        self._on_rank_0(lambda: self._set_aside(damaged))
        if oldest is not None:
            self._on_rank_0(lambda: _remove_all(listed[listed.index(oldest) + 1 :]))

    def _set_aside(self, damaged: dict[Path, str]) -> None:
        for path, problem in damaged.items():
            aside = manifest.set_aside(path)
            logger.warning("%s; it is kept as %s and counts no more", problem, aside.name)

    def _prepare(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file: a folder for checkpoints is needed")
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest.recover(self.folder)

    def _check_shared(self) -> None:
        """Refuse a folder that is local to each node, which would hold a part of each checkpoint only."""
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
        """Check checkpoints, newest first, until `enough` are whole; return them, and the damaged with their problems."""
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
        """Return the problem of a damaged checkpoint, the same on all ranks; None if it is whole.

        Rank 0 reads the manifest and the record of verified files; the other files are summed, each rank its share.
        """
        problem, files, changed = self._on_rank_0(lambda: self._begin_check(path))
        if problem is None and changed:
            try:
                manifest.check_files(path, files, changed[self._mesh.rank :: self._mesh.world])
            except CheckpointError as error:
                problem = str(error)
            problem = next((found for found in gather_objects(problem, self._group) if found is not None), None)
            if problem is None and self._mesh.rank == 0:
                self._verified.add(path, files)
        return problem

    def _begin_check(self, path: Path) -> tuple[str | None, manifest.Sums, list[str]]:
        try:
            files = manifest.read_manifest(path)
            manifest.check_files(path, files, [manifest.FACTS])
            manifest.check_name(path)
        except CheckpointError as error:
            return str(error), {}, []
        return None, files, self._verified.changed_files(path, files)

    def _listed(self, *, pinned: bool = True) -> list[Path]:
        """Return the checkpoints in the folder as rank 0 sees it, newest first; pinned ones too if `pinned`."""
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
        rank = f"(rank {self._mesh.rank})"
        return on_all_ranks(action, self._group, failed=lambda error: CheckpointError(f"{_reason(error)} {rank}"))


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        manifest.remove(path)


def _none_whole(folder: Path, damaged: dict[Path, str], aside: list[str]) -> str:
    """Return the message for a run that has checkpoints of which none is whole."""
    reasons = "; ".join(list(damaged.values())[:3]) or f"{', '.join(aside[:3])} were set aside as damaged"
    count = len(damaged) + len(aside)
    return (
        f"{folder} holds {count} checkpoint{'' if count == 1 else 's'} and none is whole ({reasons}): put a whole one back, "
        "or begin at step 1 with --restart, which deletes none of them"
    )


def bytes_of(tensors: dict[str, Tensor]) -> int:
    """Return the bytes of a checkpoint: each whole tensor once."""
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
