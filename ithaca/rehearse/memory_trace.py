"""Peak memory without a GPU: a dispatch mode follows every storage of a step, real or fake, while it is alive.

`Trace` sees the tensors that operators return, so a kernel's own workspace is not counted. FSDP2 frees gathered weights
by shrinking their storage, which is no operator's result: all sizes are read again after every operator. On the CPU
nothing moves to the host, so saved tensors that a plan offloads are subtracted while they would be there, and with
`away` weights, optimizer state and gradients always.

Invariant: a peak is of bytes that are alive at one moment, and its `Kinds` add up to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ithaca.memory.offload import STAGED, HostStore, Ticket


@dataclass(frozen=True, slots=True)
class Kinds:
    """Bytes at one moment, by kind. `working`: activations, gathered weights, buffers."""

    weights: int = 0
    optimizer: int = 0
    gradients: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.working


class Trace(TorchDispatchMode):
    """A mode that follows storages while it is entered.

    `held` returns the tensors of weights, optimizer state and gradients, which with `away` count as the host's.
    """

    def __init__(self, held: Callable[[], dict[str, list[Tensor]]], *, away: bool = False) -> None:
        super().__init__()
        self._held, self.holds_away = held, away
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.away = self._kept = self._resting = 0
        self.pinned = 0
        self.peak = Kinds()
        for tensors in held().values():
            self._see(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        # Arguments too: a buffer may be older than the trace.
        self._see(x for x in tree_leaves((given, args)) if isinstance(x, Tensor))
        self._measure()
        return given

    def begin(self) -> None:
        """Start a new phase, whose peak starts from what is alive."""
        self.peak = Kinds()
        # Gradients come and go; weights and optimizer state stay as they are until the phase ends.
        own = self._held() if self.holds_away else {}
        self._resting = bytes_of([x for kind in ("weights", "optimizer") for x in own.get(kind, [])])
        self._measure()

    def moved(self, size: int) -> None:
        """Count `size` bytes as moved to the host, or back if negative."""
        self.away += size

    def reserved(self, size: int) -> None:
        """Count `size` more bytes of pinned host memory, or fewer if negative."""
        self._kept += size
        self.pinned = max(self.pinned, self._kept)

    def _see(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            # Wrappers of tensors (DTensor, quantized tensors) have no memory of their own, and neither has meta.
            if x.layout is torch.strided and x.device.type != "meta" and not is_traceable_wrapper_subclass(x):
                storage = x.untyped_storage()
                if storage._cdata not in self._alive:
                    self._alive[storage._cdata] = weakref.ref(storage, _forget(self._alive, storage._cdata))

    def _measure(self) -> None:
        storages = [found() for found in list(self._alive.values())]
        now = sum(storage.nbytes() for storage in storages if storage is not None) - self.away
        if now - self._resting > self.peak.total:
            held = {name: bytes_of(tensors) for name, tensors in self._held().items()}
            working = now - sum(held.values())
            if not self.holds_away:
                self.peak = Kinds(**held, working=working)
            elif working > self.peak.working:
                self.peak = Kinds(working=working)


def _forget(alive: dict[int, weakref.ref[Any]], key: int) -> Callable[[Any], None]:
    def forget(dead: Any) -> None:
        # The address may belong to another storage by now.
        if alive.get(key) is dead:
            del alive[key]

    return forget


def bytes_of(tensors: list[Tensor]) -> int:
    """Return the bytes of distinct storages."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def held_by(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """Return this rank's own weights, optimizer state and gradients, on any device.

    `parameters`: those of the model between steps; in a step FSDP2 puts gathered ones in their place.
    """
    state = [x for each in optimizer.state.values() for x in tree_leaves(dict(each))]
    return {
        "weights": [_shard(p) for p in parameters],
        "optimizer": [plain for x in state if isinstance(x, Tensor) for plain in _unwrapped(_shard(x))],
        "gradients": [_shard(p.grad) for p in parameters if p.grad is not None],
    }


def _shard(x: Tensor) -> Tensor:
    # Not `to_local()`: it is an operator, and a trace asks after every operator.
    return x._local_tensor if isinstance(x, DTensor) else x


def _unwrapped(x: Tensor) -> list[Tensor]:
    """Return the tensors inside a quantized one, or the tensor itself."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    return [part for name in x.__tensor_flatten__()[0] for part in _unwrapped(getattr(x, name))]


@dataclass(slots=True, eq=False)
class TracedStore(HostStore):
    """A host store on the CPU that reports to a trace what a GPU would offload and fetch."""

    trace: Trace | None = field(default=None, repr=False)

    def put(self, tensors: list[Tensor]) -> Ticket:
        ticket = TracedTicket(self, list(tensors), None, [], size=bytes_of(tensors))
        if self.trace is not None:
            self.trace.reserved(ticket.size)
        self.staged.append(ticket)
        while len(self.staged) > STAGED:
            self.staged.popleft().free_device_tensors()
        return ticket


@dataclass(slots=True, eq=False)
class TracedTicket(Ticket):
    """Offloaded tensors of `size` bytes, which count as the host's from `free_device_tensors` to `prefetch`."""

    size: int = 0
    gone: bool = False

    def free_device_tensors(self) -> None:
        self._count(True)

    def prefetch(self) -> None:
        if self in self.store.staged:
            self.store.staged.remove(self)
        self._count(False)

    def drop(self) -> None:
        self._count(False)
        if self.tensors is not None and self._trace is not None:
            self._trace.reserved(-self.size)
        Ticket.drop(self)

    @property
    def _trace(self) -> Trace | None:
        return self.store.trace if isinstance(self.store, TracedStore) else None

    def _count(self, gone: bool) -> None:
        if self._trace is not None and gone != self.gone:
            self._trace.moved(self.size if gone else -self.size)
        self.gone = gone
