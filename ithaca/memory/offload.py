"""Activation offloading: saved tensors wait in pinned host memory, copied out and prefetched on streams of their own.

    compute stream   layer 0 | layer 1 | layer 2 | ... backward 2 | backward 1 | backward 0
    out stream            put 0     put 1                                          a put waits for the tensors' writes
    home stream                                    prefetch 1     prefetch 0       a get waits for its prefetch

`HostStore.put` starts copying tensors out and returns a `Ticket`; `Ticket.get` returns the tensors on the device, in
order with the current stream. At most `STAGED` tickets hold device tensors while the copy runs: the next `put` waits,
on the GPU, for the oldest. Tensors that are still on the device at `get`, as the last layers' are, are not copied
back. On a CPU device tickets just hold the tensors.

Host blocks are pinned once, at exactly the size needed, and kept between steps. `close`, or the end of the last
reference, unpins them.

torch's own pinned allocator does not replace this pool in any version that Ithaca runs with (2.11 to 2.13). It rounds
blocks up to powers of two, up to twice the size. Without rounding (`pinned_max_round_threshold_mb`) the allocator pins
again at every use or, as of 2.13, returns a cached block that is smaller than the request
(https://github.com/pytorch/pytorch/pull/192722). Its options hold for the whole process, and none leaves host memory
free for other processes.
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
# Host memory that is never pinned, for all other processes of the machine.
RESERVE = 4 * GIB
# Upper bound of pinned memory, as a multiple of the most that was in use at once: rows of many lengths would otherwise
# fill the host with blocks of old sizes.
SPARE = 1.25
_ALIGN = 512
# Bytes whose pages one thread faults in at a time.
_TOUCHED = 2**26


@dataclass(slots=True, eq=False, weakref_slot=True)
class _PinnedBlock:
    """Pinned bytes, unpinned with the last reference, and the event after which they may be overwritten."""

    memory: Tensor
    free_after: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        # Memory that is freed while pinned breaks whatever is allocated at that address next. Not at exit: the driver
        # unpins everything with the process, and may be gone before this finalizer runs.
        weakref.finalize(self, _unpin, self.memory.data_ptr()).atexit = False


@dataclass(slots=True, eq=False)
class HostStore:
    """Pool of pinned blocks of one model on one device. `most`: the most bytes that were in use at once."""

    device: torch.device
    free: list[_PinnedBlock] = field(default_factory=list)
    staged: deque[Ticket] = field(default_factory=deque)
    pinned: int = 0
    most: int = 0
    _streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def put(self, tensors: list[Tensor]) -> Ticket:
        """Start copying tensors out; the caller drops its references."""
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
            self.staged.popleft().free_device_tensors()
        return ticket

    def reserve(self, sizes: list[int]) -> None:
        """Replace the free blocks by blocks of these sizes, so that the next step does not wait for pinning."""
        self.close()
        self.most = max(self.most, self.pinned + sum(sizes))
        self.free += [self._pin(size) for size in sizes]

    @property
    def streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Stream of copies to the host and stream of copies back, created at first use."""
        if self._streams is None:
            self._streams = (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
        return self._streams

    def close(self) -> None:
        """Unpin and give back all host memory that is not in use."""
        self.staged.clear()
        self.pinned -= sum(block.memory.nbytes for block in self.free)
        self.free.clear()

    def _take(self, size: int) -> _PinnedBlock:
        """Return a free block of at least `size` bytes, or pin a new one."""
        in_use = self.pinned - sum(block.memory.nbytes for block in self.free)
        self.most = max(self.most, in_use + size)
        fitting = [block for block in self.free if block.memory.nbytes >= size]
        block = min(fitting, key=lambda b: b.memory.nbytes, default=None)
        # A block of more than twice the size waits for a longer row, unless no other can be pinned.
        if block is not None and (block.memory.nbytes <= 2 * size or size > min(_available(), self._spare)):
            self.free.remove(block)
            if block.free_after is not None:
                self.streams[0].wait_event(block.free_after)
            return block
        return self._pin(size)

    @property
    def _spare(self) -> int:
        """Bytes that may be pinned in addition before the pool exceeds `SPARE`."""
        return int(SPARE * self.most) - self.pinned

    def _pin(self, size: int) -> _PinnedBlock:
        available = _available()
        while size > min(available, self._spare) and self.free:
            # The free blocks are too small for this request: unpinned, their memory may serve one that fits.
            smallest = min(self.free, key=lambda b: b.memory.nbytes)
            self.free.remove(smallest)
            self.pinned -= smallest.memory.nbytes
            del smallest
            available = _available()
        if size > available:
            raise HostMemoryError(
                f"{show_bytes(size, 1)} more host memory is needed beside the {show_bytes(self.pinned, 1)} pinned, "
                f"{show_bytes(max(available, 0), 1)} can be had: offload fewer layers, or recompute attention in some"
            )
        memory = torch.empty(size, dtype=torch.uint8)
        # The driver alone faults pages in one by one: 2.5 GB a second against 10 GB on a host of 16 cores.
        _fault_in(memory)
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        if code:
            raise HostMemoryError(f"the driver did not pin {show_bytes(size, 1)} (error {code}): check `ulimit -l`")
        self.pinned += size
        return _PinnedBlock(memory)


@dataclass(slots=True, eq=False)
class Ticket:
    """Claim to offloaded tensors: `prefetch` starts copying them back, `get` returns them, once."""

    store: HostStore
    tensors: list[Tensor] | None
    block: _PinnedBlock | None
    shapes: list[tuple[torch.Size, torch.dtype]]
    copied_out: torch.cuda.Event | None = None
    copied_back: torch.cuda.Event | None = None

    def free_device_tensors(self) -> None:
        """Drop the device tensors; work of the current stream waits for the copy before it reuses their memory."""
        if self.copied_out is not None:
            torch.cuda.current_stream(self.store.device).wait_event(self.copied_out)
        self.tensors = None

    def prefetch(self) -> None:
        """Start copying the tensors back, unless they are still on the device."""
        if self in self.store.staged:
            self.store.staged.remove(self)
        if self.tensors is not None or self.block is None:
            return
        _, home = self.store.streams
        # Allocated on the current stream, whose earlier work may still use that memory: the copy waits for that work.
        self.tensors = [torch.empty(shape, dtype=dtype, device=self.store.device) for shape, dtype in self.shapes]
        home.wait_stream(torch.cuda.current_stream(self.store.device))
        if self.copied_out is not None:
            home.wait_event(self.copied_out)
        with torch.cuda.stream(home):
            for tensor, view in zip(self.tensors, _views(self.block.memory, self.tensors), strict=True):
                tensor.copy_(view, non_blocking=True)
            self.copied_back = torch.cuda.Event()
            self.copied_back.record()

    def get(self) -> list[Tensor]:
        """Return the tensors on the device and free the host block."""
        self.prefetch()
        assert self.tensors is not None, "a ticket is good for one get"
        event = self.copied_back or self.copied_out
        if event is not None:
            # Tensors that never left are still read by the copy to the host.
            torch.cuda.current_stream(self.store.device).wait_event(event)
        tensors = self.tensors
        self.drop()
        return tensors

    def __del__(self) -> None:
        # A graph may be freed before its backward.
        self.drop()

    def drop(self) -> None:
        """Return the host block to the pool and forget the tensors."""
        self.tensors = None
        if self.block is not None:
            self.block.free_after = self.copied_back or self.copied_out
            self.store.free.append(self.block)
            self.block = None


def _available() -> int:
    """Return the bytes of host memory that may be pinned."""
    return psutil.virtual_memory().available - RESERVE


def _round(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _views(memory: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return the block's bytes as consecutive tensors of these shapes."""
    starts = [0, *accumulate(_round(x.nbytes) for x in like)]
    return [memory[at : at + x.nbytes].view(x.dtype).view(x.shape) for at, x in zip(starts, like, strict=False)]


def _fault_in(memory: Tensor) -> None:
    """Write to every page of fresh memory, on this rank's share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(max(1, cores // ranks_here())) as pool:
        list(pool.map(lambda part: part[:: mmap.PAGESIZE].zero_(), memory.split(_TOUCHED)))


def _unpin(address: int) -> None:
    # A device that has failed has unpinned everything already.
    with suppress(RuntimeError):
        # A copy may still be running.
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)
