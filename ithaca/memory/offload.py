"""Saved tensors wait in pinned host memory: out on a side stream, back on another, prefetched.

`HostStore.put` starts copying tensors out and gives a `Ticket`; `Ticket.get` gives them back on the device, in order
with the current stream. At most `STAGED` tickets hold their device tensors while they are copied out: the next `put`
then waits, on the GPU, for the oldest. What is still here when it is wanted back, as the last layers' tensors are,
is not copied again. On a CPU device there is nothing to move: tickets just hold the tensors.

Host blocks are pinned once, exactly as large as needed, kept between steps, and given back by `close` or with the last
that holds them: memory freed while the driver still knows it would be in the way of whatever comes to lie there next.
Their pages are had from the kernel by all cores before the driver pins them: it would ask for them one by one, which
took four times as long (2.5 and 10 GB a second on a host of 16 cores).

torch's own pinned allocator cannot take the pool's place in any version that Ithaca runs with (2.11 to 2.13). It rounds
blocks up to powers of two, up to twice as much; without the rounding (`pinned_max_round_threshold_mb`) it either pins
anew at every use or, as of 2.13, hands out a cached block that is smaller than what was asked for
(https://github.com/pytorch/pytorch/pull/192722). Its options hold for the whole process, and none keeps host memory
free for others.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate

import psutil
import torch
from torch import Tensor

from ithaca.constants import GIB
from ithaca.errors import HostMemoryError
from ithaca.mesh import ranks_here
from ithaca.quantities import show_bytes

STAGED = 2
# Host memory that is left to everybody else on the machine.
RESERVE = 4 * GIB
# Pinned memory is at most so many times what was ever in use at once: blocks of lengths gone by are given back.
SPARE = 1.25
_ALIGN = 512
# Bytes whose pages one thread asks for at a time.
_TOUCHED = 2**26


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Block:
    """Pinned bytes, unpinned when nobody holds them, and the event after which they may be written again."""

    memory: Tensor
    free_after: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        # With the process itself the driver lets go of everything.
        weakref.finalize(self, _unpin, self.memory.data_ptr()).atexit = False


@dataclass(slots=True, eq=False)
class HostStore:
    """The pinned blocks of one model on one device."""

    device: torch.device
    free: list[_Block] = field(default_factory=list)
    staged: deque[Ticket] = field(default_factory=deque)
    pinned: int = 0
    most: int = 0
    _streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def put(self, tensors: list[Tensor]) -> Ticket:
        """Start copying out; the caller drops its references."""
        if self.device.type != "cuda":
            return Ticket(self, list(tensors), None, [])
        block = self._take(sum(_round(x.nbytes) for x in tensors))
        out, _ = self.streams
        out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(out):
            views = _views(block.memory, tensors)
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        ticket = Ticket(self, list(tensors), block, [(x.shape, x.dtype) for x in tensors], done)
        self.staged.append(ticket)
        while len(self.staged) > STAGED:
            self.staged.popleft().let_go()
        return ticket

    def reserve(self, sizes: list[int]) -> None:
        """Have blocks of these sizes instead of those that lie free: a step that finds them does not wait for pinning."""
        self.close()
        self.most = max(self.most, self.pinned + sum(sizes))
        self.free += [self._pin(size) for size in sizes]

    @property
    def streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """One for each direction, made at first use."""
        if self._streams is None:
            self._streams = (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
        return self._streams

    def close(self) -> None:
        """Unpin and give back all host memory that is not in use."""
        self.staged.clear()
        self.pinned -= sum(block.memory.nbytes for block in self.free)
        self.free.clear()

    def _take(self, size: int) -> _Block:
        """A free block, one far too large only where no other can be had."""
        self.most = max(self.most, self._used + size)
        fitting = [block for block in self.free if block.memory.nbytes >= size]
        block = min(fitting, key=lambda b: b.memory.nbytes, default=None)
        if block is not None and (block.memory.nbytes <= 2 * size or size > min(_room(), self._spare)):
            self.free.remove(block)
            if block.free_after is not None:
                self.streams[0].wait_event(block.free_after)
            return block
        return self._pin(size)

    @property
    def _used(self) -> int:
        return self.pinned - sum(block.memory.nbytes for block in self.free)

    @property
    def _spare(self) -> int:
        """What may yet be pinned beside what lies free: rows of many lengths are not to take the whole host for a pool."""
        return int(SPARE * self.most) - self.pinned

    def _pin(self, size: int) -> _Block:
        room = _room()
        while size > min(room, self._spare) and self.free:
            # Too small for this, and for what comes: pinned anew they may fit.
            smallest = min(self.free, key=lambda b: b.memory.nbytes)
            self.free.remove(smallest)
            self.pinned -= smallest.memory.nbytes
            del smallest
            room = _room()
        if size > room:
            raise HostMemoryError(
                f"{show_bytes(size, 1)} more host memory is needed beside the {show_bytes(self.pinned, 1)} pinned, "
                f"{show_bytes(max(room, 0), 1)} can be had: offload fewer layers, or recompute attention in some"
            )
        memory = torch.empty(size, dtype=torch.uint8)
        _touch(memory)
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        if code:
            raise HostMemoryError(f"the driver did not pin {show_bytes(size, 1)} (error {code}): check `ulimit -l`")
        self.pinned += size
        return _Block(memory)


@dataclass(slots=True, eq=False)
class Ticket:
    """Tensors that are away. `prefetch` starts bringing them back; `get` gives them, once."""

    store: HostStore
    tensors: list[Tensor] | None
    block: _Block | None
    kinds: list[tuple[torch.Size, torch.dtype]]
    left: torch.cuda.Event | None = None
    back: torch.cuda.Event | None = None

    def let_go(self) -> None:
        """Copied out: after this wait the tensors' memory may be reused by work of the current stream."""
        if self.left is not None:
            torch.cuda.current_stream(self.store.device).wait_event(self.left)
        self.tensors = None

    def prefetch(self) -> None:
        if self in self.store.staged:
            # Still here; nobody else may let go of it now.
            self.store.staged.remove(self)
        if self.tensors is not None or self.block is None:
            return
        _, home = self.store.streams
        # Allocated by the current stream, whose earlier work may still use that memory: the copy waits for it.
        self.tensors = [torch.empty(shape, dtype=dtype, device=self.store.device) for shape, dtype in self.kinds]
        home.wait_stream(torch.cuda.current_stream(self.store.device))
        if self.left is not None:
            home.wait_event(self.left)
        with torch.cuda.stream(home):
            for tensor, view in zip(self.tensors, _views(self.block.memory, self.tensors), strict=True):
                tensor.copy_(view, non_blocking=True)
            self.back = torch.cuda.Event()
            self.back.record()

    def get(self) -> list[Tensor]:
        self.prefetch()
        assert self.tensors is not None, "a ticket is good for one get"
        event = self.back or self.left
        if event is not None:
            # Where they never went away, their memory must outlive the copy that still reads it.
            torch.cuda.current_stream(self.store.device).wait_event(event)
        tensors = self.tensors
        self.drop()
        return tensors

    def __del__(self) -> None:
        # A graph that is thrown away before its backward gives its host memory back.
        self.drop()

    def drop(self) -> None:
        """Give the host block back; what it held is gone."""
        self.tensors = None
        if self.block is not None:
            self.block.free_after = self.back or self.left
            self.store.free.append(self.block)
            self.block = None


def _room() -> int:
    """Host memory that may yet be pinned."""
    return psutil.virtual_memory().available - RESERVE


def _round(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _views(memory: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The block's bytes as tensors of these shapes, one after another."""
    starts = [0, *accumulate(_round(x.nbytes) for x in like)]
    return [memory[at : at + x.nbytes].view(x.dtype).view(x.shape) for at, x in zip(starts, like, strict=False)]


def _touch(memory: Tensor) -> None:
    """Have every page of fresh memory, asked for by this rank's share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(max(1, cores // ranks_here())) as pool:
        list(pool.map(lambda part: part[:: mmap.PAGESIZE].zero_(), memory.split(_TOUCHED)))


def _unpin(address: int) -> None:
    # A device that has failed has let go of everything already.
    with suppress(RuntimeError):
        # A copy may still be under way.
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)
