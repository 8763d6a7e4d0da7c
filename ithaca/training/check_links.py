"""Self-test of every collective that a run uses, on a few numbers with known results, before the first step.

Broken links, mixed-up devices and wrong libraries show here in seconds, with the operation and the group by name,
instead of as a hang or a wrong loss later. The numbers are whole and small enough for bf16, so results are compared
exactly.

Invariant: `check_collectives` returns on all ranks, or raises within its time; a hanging collective cannot hold it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.errors import LinkError
from ithaca.mesh import Mesh


@dataclass(frozen=True, slots=True)
class _Group:
    """A process group, its size, and this rank's number in the group."""

    group: dist.ProcessGroup
    size: int
    rank: int
    device: torch.device
    dtype: torch.dtype

    # Numbers below 101 are exact in bf16.
    def full(self, count: int, value: int) -> Tensor:
        return torch.full((count,), value % 100, device=self.device, dtype=self.dtype)

    def one_hot(self, at: int) -> Tensor:
        """Return zeros with one number at this rank's index, so that a sum has a number of every rank."""
        given = torch.zeros(self.size, device=self.device, dtype=self.dtype)
        given[self.rank] = (self.rank + at) % 100 + 1
        return given

    def sum_of_one_hots(self, at: int) -> Tensor:
        return ((torch.arange(self.size, device=self.device) + at) % 100 + 1).to(self.dtype)


def check_collectives(mesh: Mesh, seconds: float = 60.0) -> None:
    """Run every collective in every group of `mesh` that has several ranks; LinkError names the one that fails."""
    test = _LinkTest(mesh)
    # A collective that hangs cannot be interrupted, so it hangs in a thread, and this thread reports it.
    thread = threading.Thread(target=test.run, daemon=True, name="ithaca collectives")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise LinkError(
            f"{test.now} had no answer within {seconds:g} s: look at the network between the ranks' machines "
            "(NCCL_DEBUG=INFO shows the links, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose them)"
        )
    if test.error is not None:
        raise test.error


class _LinkTest:
    """The self-test on this rank. `now`: the collective under way."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.now = "the first collective"
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            if self.mesh.device.type == "cuda":
                torch.cuda.set_device(self.mesh.device)
            for name, group in _groups(self.mesh):
                for operation, attempt in _OPERATIONS.items():
                    self._try(operation, name, group, attempt)
        except Exception as error:
            self.error = error

    def _try(
        self, operation: str, name: str, group: _Group, attempt: Callable[[_Group], tuple[Tensor, Tensor]]
    ) -> None:
        kind = str(group.dtype).removeprefix("torch.")
        self.now = f"{operation} of {kind} in the {name} group of {group.size} ranks"
        try:
            got, want = attempt(group)
            same = torch.equal(got, want)
        except RuntimeError as error:
            raise LinkError(f"{self.now} failed: {error}") from error
        if not same:
            raise LinkError(
                f"{self.now} gave {got.flatten()[:8].tolist()} on rank {self.mesh.rank}, not {want.flatten()[:8].tolist()}: "
                "the links or the libraries of these machines change data, do not train on them"
            )


def _groups(mesh: Mesh) -> Iterator[tuple[str, _Group]]:
    kinds = [torch.float32, torch.int64]
    if mesh.device.type == "cuda":
        kinds.append(torch.bfloat16)
    axes = {"dp": mesh.data, "sp": mesh.device_mesh["sp"], "sequence": mesh.sequence, "weights": mesh.weights}
    for name, axis in axes.items():
        if axis.size() > 1:
            for kind in kinds:
                yield name, _Group(axis.get_group(), axis.size(), axis.get_local_rank(), mesh.device, kind)


def _all_to_all(own: _Group, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Send `sizes[other]` numbers to each rank, and receive as many."""
    n, r = own.size, own.rank
    given = torch.cat([own.full(sizes[other], r * n + other) for other in range(n)])
    want = torch.cat([own.full(sizes[other], other * n + r) for other in range(n)])
    got = torch.empty_like(want)
    dist.all_to_all_single(got, given, sizes, sizes, group=own.group)
    return got, want


def _even(own: _Group) -> tuple[Tensor, Tensor]:
    return _all_to_all(own, [3] * own.size)


def _uneven(own: _Group) -> tuple[Tensor, Tensor]:
    return _all_to_all(own, [(own.rank + other) % 3 + 1 for other in range(own.size)])


def _all_gather(own: _Group) -> tuple[Tensor, Tensor]:
    want = torch.cat([own.full(3, other) for other in range(own.size)])
    got = torch.empty_like(want)
    dist.all_gather_into_tensor(got, own.full(3, own.rank), group=own.group)
    return got, want


def _reduce_scatter(own: _Group) -> tuple[Tensor, Tensor]:
    want = own.sum_of_one_hots(own.rank)
    got = torch.empty_like(want)
    dist.reduce_scatter_tensor(got, torch.cat([own.one_hot(at) for at in range(own.size)]), group=own.group)
    return got, want


def _all_reduce(own: _Group) -> tuple[Tensor, Tensor]:
    got = own.one_hot(0)
    dist.all_reduce(got, group=own.group)
    return got, own.sum_of_one_hots(0)


def _least(own: _Group) -> tuple[Tensor, Tensor]:
    got = own.full(3, own.rank)
    dist.all_reduce(got, dist.ReduceOp.MIN, group=own.group)
    return got, own.full(3, 0)


def _largest(own: _Group) -> tuple[Tensor, Tensor]:
    got = own.full(3, own.rank)
    dist.all_reduce(got, dist.ReduceOp.MAX, group=own.group)
    return got, own.full(3, min(own.size - 1, 99))


def _broadcast(own: _Group) -> tuple[Tensor, Tensor]:
    last = own.size - 1
    got = own.full(3, own.rank + 1)
    dist.broadcast(got, group=own.group, group_src=last)
    return got, own.full(3, last + 1)


def _barrier(own: _Group) -> tuple[Tensor, Tensor]:
    dist.barrier(own.group)
    return own.full(1, 1), own.full(1, 1)


_OPERATIONS: dict[str, Callable[[_Group], tuple[Tensor, Tensor]]] = {
    "all_to_all_single (even)": _even,
    "all_to_all_single (uneven)": _uneven,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_reduce (sum)": _all_reduce,
    "all_reduce (min)": _least,
    "all_reduce (max)": _largest,
    "broadcast": _broadcast,
    "barrier": _barrier,
}
