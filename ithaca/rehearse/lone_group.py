"""A process group of any size in one process, in which one rank of a cluster's job is rehearsed.

    with simulated_world(64, rank=3):      torch.distributed is initialized as rank 3 of 64
        mesh = init_mesh(sp=8)             its groups are of 8, 64, ... ranks, all in this process
        dist.all_to_all_single(...)        returns at once; `sent_of(group)` counts the bytes for other ranks

Every other rank is assumed to send what this rank sends. So received buffers are filled with this rank's own numbers,
because a GPU's speed under its power limit depends on the numbers it computes with, and NaN would spread. torch's own
fake group leaves received buffers unchanged (up to 2.11) or refuses uneven splits. Gathered weights are copies of this
rank's shard, each shifted by a few numbers, so that no two experts are the same.

Invariant: a collective touches no memory but its own buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from ithaca.errors import MeshError

Like = Literal["nccl", "gloo"]
# Bytes by which the copies of neighbouring ranks are shifted against each other: the unit of an aligned copy.
_SHIFT = 16


@dataclass(slots=True)
class TrafficCounter:
    """Traffic to other ranks: calls and bytes by collective; `spans` are the events around each filled buffer."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    def count(self, name: str, size: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.bytes[name] = self.bytes.get(name, 0) + size

    def filling_s(self, first: int = 0, last: int | None = None) -> float:
        """Return the seconds that the device filled buffers, which a real exchange would not take; 0 without a GPU."""
        return sum(start.elapsed_time(end) for start, end in self.spans[first:last]) / 1e3

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()
        self.spans.clear()


class _FinishedWork(dist.Work):
    """A finished collective that holds its buffers: NCCL's until `wait`, gloo's until the work object is freed."""

    def __init__(self, like: Like, *held: Tensor) -> None:
        super().__init__()
        self._like, self._held = like, held

    def wait(self, timeout: Any = None) -> bool:
        if self._like == "nccl":
            self._held = ()
        return True

    def is_completed(self) -> bool:
        return True


# `Any`, because the overloads of torch's own stubs differ between releases.
_ProcessGroup: Any = dist.ProcessGroup


class LoneGroup(_ProcessGroup):
    """A process group of `size` ranks with one real one."""

    def __init__(self, rank: int, size: int, like: Like) -> None:
        super().__init__(rank, size)
        self.sent, self.like = TrafficCounter(), like
        self._name = self._desc = ""

    def getBackendName(self) -> str:
        return f"rehearsal_{self.like}"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, name: str) -> None:
        self._desc = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Sum equal parts; a table to which each rank adds its own row gets equal rows."""
        for tensor in tensors:
            self.sent.count("all-reduce", 2 * tensor.nbytes * (self.size() - 1) // self.size())
            if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
                continue
            if tensor.dtype == torch.int64 and tensor.dim() == 2 and tensor.shape[0] == self.size():
                tensor.copy_(tensor[self.rank()].clone().expand_as(tensor))
            else:
                tensor.mul_(self.size())
        return _FinishedWork(self.like, *tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return _FinishedWork(self.like, *tensors)

    def barrier(self, opts: Any = None) -> Any:
        return _FinishedWork(self.like)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        self.sent.count("all-gather", given.nbytes * (self.size() - 1))
        own = _bytes(given)
        for rank, part in enumerate(_bytes(output).view(self.size(), -1)):
            # FSDP2 gathers in place: this rank's part of the output is the input.
            if not _same_memory(part, own):
                _copy_shifted(part, own, _SHIFT * (rank - self.rank()))
        return _FinishedWork(self.like, output, given)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        self.sent.count("reduce-scatter", given.nbytes * (self.size() - 1) // self.size())
        output.copy_(given.view(self.size(), -1)[self.rank()].view_as(output))
        return _FinishedWork(self.like, output, given)

    def alltoall_base(
        self, output: Tensor, given: Tensor, arriving: list[int], leaving: list[int], opts: Any = None
    ) -> Any:
        whole = given.numel()
        own = leaving[self.rank()] * (whole // given.shape[0]) if leaving else whole // self.size()
        self.sent.count("all-to-all", (whole - own) * given.element_size())
        start = _event(given)
        _copy_repeated(output.view(-1), given.reshape(-1))
        if start is not None:
            self.sent.spans.append((start, _event(given)))
        return _FinishedWork(self.like, output, given)

    # torch up to 2.11 calls these collectives by the names above, from 2.13 on by the names below.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base


@contextmanager
def simulated_world(world: int, rank: int, like: Like = "nccl") -> Iterator[None]:
    """Initialize torch.distributed as rank `rank` of `world`; destroy it at the end. `like`: the backend to imitate."""
    if not 0 <= rank < world:
        raise MeshError(f"rank {rank} of a world of {world}: ranks count from 0 to {world - 1}")
    if dist.is_initialized():
        raise MeshError("this process is in a process group already: rehearse in one of its own")
    name = f"rehearsal_{like}"
    if not hasattr(dist.Backend, name.upper()):

        def create(store: Any, rank: int, size: int, timeout: Any) -> LoneGroup:
            return LoneGroup(rank, size, like)

        dist.Backend.register_backend(name, create, devices=["cpu", "cuda"])
    dist.init_process_group(name, store=HashStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sent_of(group: dist.ProcessGroup) -> TrafficCounter:
    """Return what a group's collectives sent; empty if its ranks are real."""
    return group.sent if isinstance(group, LoneGroup) else TrafficCounter()


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    # By storage and offset: fake tensors have no address.
    at = one.storage_offset() == other.storage_offset()
    return at and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _copy_shifted(target: Tensor, source: Tensor, by: int) -> None:
    """Copy `source` rotated by `by` bytes: its end comes first."""
    at = by % source.numel() if source.numel() else 0
    target[at:].copy_(source[: source.numel() - at])
    target[:at].copy_(source[source.numel() - at :])


def _copy_repeated(target: Tensor, source: Tensor) -> None:
    for start in range(0, target.numel(), max(1, source.numel())):
        part = target[start : start + source.numel()]
        part.copy_(source[: part.numel()])


def _event(x: Tensor) -> Any:
    if x.device.type != "cuda" or not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
