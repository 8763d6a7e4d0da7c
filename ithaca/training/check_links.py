"""Every collective that a run will use, tried on a few numbers with known answers, before hours are spent.

Broken links, mixed-up devices and wrong libraries show here in seconds, with the operation and the group by name,
instead of as a hang or a wrong loss later. The answers are whole numbers small enough for bf16, so they are compared
exactly.

Invariant: `check_collectives` returns on all ranks or raises within its time; it does not hang with what it tries.
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
    """One group as this rank sees it."""

    group: dist.ProcessGroup
    size: int
    rank: int
    device: torch.device
    dtype: torch.dtype

    def full(self, count: int, value: int) -> Tensor:
        return torch.full((count,), value % 100, device=self.device, dtype=self.dtype)

    def own(self, at: int) -> Tensor:
        """Zero but for this rank's place, so that a sum shows what every rank gave."""
        given = torch.zeros(self.size, device=self.device, dtype=self.dtype)
        given[self.rank] = (self.rank + at) % 100 + 1
        return given

    def summed(self, at: int) -> Tensor:
        return ((torch.arange(self.size, device=self.device) + at) % 100 + 1).to(self.dtype)


def check_collectives(mesh: Mesh, seconds: float = 60.0) -> None:
    """Try them all in every group of `mesh` that has several ranks; raises LinkError with the name of what is wrong."""
    trial = _Trial(mesh)
    # In a thread: a collective that hangs cannot be interrupted, but its caller can go on to say so.
    thread = threading.Thread(target=trial.run, daemon=True, name="ithaca collectives")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise LinkError(
            f"{trial.now} had no answer within {seconds:g} s: look at the network between the ranks' machines "
            "(NCCL_DEBUG=INFO shows the links, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose them)"
        )
    if trial.error is not None:
        raise trial.error


class _Trial:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.now = "the first collective"
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            if self.mesh.device.type == "cuda":
                torch.cuda.set_device(self.mesh.device)
            for name, place in _groups(self.mesh):
                for operation, attempt in _OPERATIONS.items():
                    self._try(operation, name, place, attempt)
        except Exception as error:
            self.error = error

    def _try(
        self, operation: str, name: str, place: _Group, attempt: Callable[[_Group], tuple[Tensor, Tensor]]
    ) -> None:
        kind = str(place.dtype).removeprefix("torch.")
        self.now = f"{operation} of {kind} in the {name} group of {place.size} ranks"
        try:
            got, want = attempt(place)
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


def _all_to_all(place: _Group, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """`sizes[other]` numbers to each rank, and as many back."""
    n, r = place.size, place.rank
    given = torch.cat([place.full(sizes[other], r * n + other) for other in range(n)])
    want = torch.cat([place.full(sizes[other], other * n + r) for other in range(n)])
    got = torch.empty_like(want)
    dist.all_to_all_single(got, given, sizes, sizes, group=place.group)
    return got, want


def _even(place: _Group) -> tuple[Tensor, Tensor]:
    return _all_to_all(place, [3] * place.size)


def _uneven(place: _Group) -> tuple[Tensor, Tensor]:
    return _all_to_all(place, [(place.rank + other) % 3 + 1 for other in range(place.size)])


def _all_gather(place: _Group) -> tuple[Tensor, Tensor]:
    want = torch.cat([place.full(3, other) for other in range(place.size)])
    got = torch.empty_like(want)
    dist.all_gather_into_tensor(got, place.full(3, place.rank), group=place.group)
    return got, want


def _reduce_scatter(place: _Group) -> tuple[Tensor, Tensor]:
    want = place.summed(place.rank)
    got = torch.empty_like(want)
    dist.reduce_scatter_tensor(got, torch.cat([place.own(at) for at in range(place.size)]), group=place.group)
    return got, want


def _all_reduce(place: _Group) -> tuple[Tensor, Tensor]:
    got = place.own(0)
    dist.all_reduce(got, group=place.group)
    return got, place.summed(0)


def _least(place: _Group) -> tuple[Tensor, Tensor]:
    got = place.full(3, place.rank)
    dist.all_reduce(got, dist.ReduceOp.MIN, group=place.group)
    return got, place.full(3, 0)


def _largest(place: _Group) -> tuple[Tensor, Tensor]:
    got = place.full(3, place.rank)
    dist.all_reduce(got, dist.ReduceOp.MAX, group=place.group)
    return got, place.full(3, min(place.size - 1, 99))


def _broadcast(place: _Group) -> tuple[Tensor, Tensor]:
    last = place.size - 1
    got = place.full(3, place.rank + 1)
    dist.broadcast(got, group=place.group, group_src=last)
    return got, place.full(3, last + 1)


def _barrier(place: _Group) -> tuple[Tensor, Tensor]:
    dist.barrier(place.group)
    return place.full(1, 1), place.full(1, 1)


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
