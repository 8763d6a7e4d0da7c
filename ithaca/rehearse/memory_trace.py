"""Memory without a GPU: every storage a step makes is followed from its making to its end, real or fake.

`Trace` is a dispatch mode around a step on the CPU. It sees what operators return, so a kernel's own workspace is not
in it. FSDP2 frees gathered weights by shrinking their storage, which no operator tells of: sizes are therefore read
anew after every operator. Saved tensors that a plan sends to the host are counted there while they are away, and with
`away` weights, optimizer state and gradients always, since on the CPU nothing moves.

Invariant: peaks are of bytes that are alive at one moment, and `Kinds` of a peak adds up to it.
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
    """Bytes of one moment, by what they are of. `working`: activations, gathered weights, buffers."""

    weights: int = 0
    optimizer: int = 0
    gradients: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.working


class Trace(TorchDispatchMode):
    """Follows storages while it is entered. `held` gives the tensors of weights, optimizer state and gradients, which
    with `away` are the host's."""

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
        # Arguments too: a buffer may have been made before the trace began.
        self._see(x for x in tree_leaves((given, args)) if isinstance(x, Tensor))
        self._measure()
        return given

    def begin(self) -> None:
        """A new phase: its peak starts from what is there."""
        self.peak = Kinds()
        # Gradients come and go; the others stay as they are until the phase ends.
        own = self._held() if self.holds_away else {}
        self._resting = bytes_of([x for kind in ("weights", "optimizer") for x in own.get(kind, [])])
        self._measure()

    def moved(self, size: int) -> None:
        """So many bytes left for the host, or came back."""
        self.away += size

    def reserved(self, size: int) -> None:
        """The host keeps so many bytes more for saved tensors, or fewer."""
        self._kept += size
        self.pinned = max(self.pinned, self._kept)

    def _see(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            # What wraps other tensors (DTensor, quantized ones) has no memory of its own; shapes are tried out on meta.
            if x.layout is torch.strided and x.device.type != "meta" and not is_traceable_wrapper_subclass(x):
                storage = x.untyped_storage()
                if storage._cdata not in self._alive:
                    self._alive[storage._cdata] = weakref.ref(storage, _forgets(self._alive, storage._cdata))

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


def _forgets(alive: dict[int, weakref.ref[Any]], key: int) -> Callable[[Any], None]:
    def forget(dead: Any) -> None:
        # The address may be another storage's by now.
        if alive.get(key) is dead:
            del alive[key]

    return forget


def bytes_of(tensors: list[Tensor]) -> int:
    """Bytes of distinct storages."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def held_by(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """This rank's own tensors that stay from step to step; on whichever device.

    `parameters` are taken while the model is at rest: in a step FSDP2 puts gathered ones in their place.
    """
    state = [x for each in optimizer.state.values() for x in tree_leaves(dict(each))]
    return {
        "weights": [_own(p) for p in parameters],
        "optimizer": [plain for x in state if isinstance(x, Tensor) for plain in _plain(_own(x))],
        "gradients": [_own(p.grad) for p in parameters if p.grad is not None],
    }


def _own(x: Tensor) -> Tensor:
    """This rank's part, taken without an operator: a trace asks after every one."""
    return x._local_tensor if isinstance(x, DTensor) else x


def _plain(x: Tensor) -> list[Tensor]:
    """The tensors inside a quantized one."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    return [part for name in x.__tensor_flatten__()[0] for part in _plain(getattr(x, name))]


@dataclass(slots=True, eq=False)
class TracedStore(HostStore):
    """A host store on the CPU that tells a trace what would have left and come back, as on a GPU."""

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
    """`size` bytes that count as the host's from `free_device_tensors` to `prefetch`."""

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
