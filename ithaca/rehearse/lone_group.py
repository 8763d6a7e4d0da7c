"""The other ranks of a rehearsal: a process group of any size in one process, whose collectives arrive at once.

Every other rank is taken to say what this one says. torch's own fake group leaves received buffers as they were (up to
2.11) or refuses uneven splits; here they are filled with this rank's own numbers, because a GPU's speed under its power
limit depends on the numbers it computes with, and NaN would spread. Gathered weights are this rank's shard over and
over, moved by a few numbers for each rank, so that no two experts are the same.

Invariant: a collective touches no memory but its own buffers, and `Sent` counts the bytes it would have sent to others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from ithaca.errors import MeshError

Like = Literal["nccl", "gloo"]
# Gathered shards are moved against each other by so many bytes a rank: the unit of an aligned copy.
_MOVE = 16


@dataclass(slots=True)
class Sent:
    """What this rank would have sent to others: calls and bytes by collective, and how long filling buffers took."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    def note(self, name: str, size: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.bytes[name] = self.bytes.get(name, 0) + size

    def filling_s(self, first: int = 0, last: int | None = None) -> float:
        """Seconds of the device that a real exchange would not have taken from computing; 0 without a GPU."""
        return sum(start.elapsed_time(end) for start, end in self.spans[first:last]) / 1e3

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()
        self.spans.clear()


class _Arrived(dist.Work):
    """A collective that is over, and the buffers it holds: NCCL lets go of them when it is waited for, gloo when nobody
    has it any more."""

    def __init__(self, like: Like, *held: Tensor) -> None:
        super().__init__()
        self._like, self._held = like, held

    def wait(self, timeout: Any = None) -> bool:
        if self._like == "nccl":
            self._held = ()
        return True

    def is_completed(self) -> bool:
        return True


# Overloads of torch's own stubs differ between releases.
_ProcessGroup: Any = dist.ProcessGroup


class AloneGroup(_ProcessGroup):
    """One rank of `size`. torch calls the same collective by one name up to 2.11 and by another from 2.13 on."""

    def __init__(self, rank: int, size: int, like: Like) -> None:
        super().__init__(rank, size)
        self.sent, self.like = Sent(), like
        self._name = self._desc = ""

    def getBackendName(self) -> str:
        return _name(self.like)

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
        """Sums are of equal parts. A table with one row a rank, filled in by each for itself, gets equal rows."""
        for tensor in tensors:
            self.sent.note("all-reduce", 2 * tensor.nbytes * (self.size() - 1) // self.size())
            if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
                continue
            if tensor.dtype == torch.int64 and tensor.dim() == 2 and tensor.shape[0] == self.size():
                tensor.copy_(tensor[self.rank()].clone().expand_as(tensor))
            else:
                tensor.mul_(self.size())
        return _Arrived(self.like, *tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return _Arrived(self.like, *tensors)

    def barrier(self, opts: Any = None) -> Any:
        return _Arrived(self.like)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        self.sent.note("all-gather", given.nbytes * (self.size() - 1))
        own = _bytes(given)
        for rank, part in enumerate(_bytes(output).view(self.size(), -1)):
            # FSDP2 gathers in place: its own part is the input.
            if not _same_memory(part, own):
                _moved(part, own, _MOVE * (rank - self.rank()))
        return _Arrived(self.like, output, given)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        self.sent.note("reduce-scatter", given.nbytes * (self.size() - 1) // self.size())
        output.copy_(given.view(self.size(), -1)[self.rank()].view_as(output))
        return _Arrived(self.like, output, given)

    def alltoall_base(
        self, output: Tensor, given: Tensor, arriving: list[int], leaving: list[int], opts: Any = None
    ) -> Any:
        whole = given.numel()
        own = leaving[self.rank()] * (whole // given.shape[0]) if leaving else whole // self.size()
        self.sent.note("all-to-all", (whole - own) * given.element_size())
        start = _event(given)
        _repeated(output.view(-1), given.reshape(-1))
        if start is not None:
            self.sent.spans.append((start, _event(given)))
        return _Arrived(self.like, output, given)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base


@contextmanager
def alone(world: int, rank: int, like: Like = "nccl") -> Iterator[None]:
    """Join torch.distributed as rank `rank` of `world`, alone; left again at the end. `like`: who holds buffers as long."""
    if not 0 <= rank < world:
        raise MeshError(f"rank {rank} of a world of {world}: ranks count from 0 to {world - 1}")
    if dist.is_initialized():
        raise MeshError("this process is in a process group already: rehearse in one of its own")
    name = _name(like)
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, partial(_create, like), devices=["cpu", "cuda"])
    dist.init_process_group(name, store=HashStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sent_of(group: dist.ProcessGroup) -> Sent:
    """What a group's collectives sent; nothing is counted where ranks are real."""
    return group.sent if isinstance(group, AloneGroup) else Sent()


def _create(like: Like, store: Any, rank: int, size: int, timeout: Any) -> AloneGroup:
    return AloneGroup(rank, size, like)


def _name(like: Like) -> str:
    return f"rehearsal_{like}"


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """By storage and place in it: fake tensors have no address."""
    at = one.storage_offset() == other.storage_offset()
    return at and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _moved(target: Tensor, source: Tensor, by: int) -> None:
    """`source`, its end first: everything moved on by `by` bytes."""
    at = by % source.numel() if source.numel() else 0
    target[at:].copy_(source[: source.numel() - at])
    target[:at].copy_(source[source.numel() - at :])


def _repeated(target: Tensor, source: Tensor) -> None:
    for start in range(0, target.numel(), max(1, source.numel())):
        part = target[start : start + source.numel()]
        part.copy_(source[: part.numel()])


def _event(x: Tensor) -> Any:
    if x.device.type != "cuda" or not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
