"""The pinned pool: what it refuses before it pins, what it reuses, and what it gives back."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ithaca.errors import HostMemoryError
from ithaca.memory import offload
from ithaca.memory.offload import HostStore, Ticket


class Driver:
    """Stands for the driver, which is asked to pin and to let go."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def cudart(self) -> Driver:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.held[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.held[address]
        return 0


@pytest.fixture
def driver() -> Iterator[Driver]:
    stand_in = Driver()
    with patch.object(torch.cuda, "cudart", stand_in.cudart), patch.object(torch.cuda, "synchronize"):
        yield stand_in


def store() -> HostStore:
    return HostStore(torch.device("cuda", 0))


def test_store_size_beyond_host_is_refused_unpinned(driver: Driver) -> None:
    pool = store()
    with patch.object(offload.psutil, "virtual_memory") as memory:
        memory.return_value.available = offload.RESERVE + 2**30
        with pytest.raises(HostMemoryError, match=r"2\.0 GiB more .* 1\.0 GiB can be had: offload fewer layers"):
            pool._pin(2 * 2**30)
    assert not driver.held
    assert pool.pinned == 0


def test_store_full_host_reuses_large_block(driver: Driver) -> None:
    """Free blocks are no use to a host that has no memory left: one far too large is taken, small ones are given back."""
    pool = store()
    pool.reserve([2**12, 2**20])
    with patch.object(offload.psutil, "virtual_memory") as memory:
        memory.return_value.available = offload.RESERVE + 100
        large = pool._take(2**14)
        assert large.memory.nbytes == 2**20
        with pytest.raises(HostMemoryError):
            pool._take(2**14)
        assert (pool.free, pool.pinned) == ([], 2**20)
    assert list(driver.held.values()) == [2**20]


def test_store_driver_error_names_ulimit(driver: Driver) -> None:
    with (
        patch.object(driver, "cudaHostRegister", lambda *_: 2),
        pytest.raises(HostMemoryError, match=r"did not pin .*error 2.*ulimit -l"),
    ):
        store()._pin(1024)


def _pages(address: int, size: int) -> list[bool]:
    """Return True for each resident page of this memory."""
    first, end = -(-address // mmap.PAGESIZE), (address + size) // mmap.PAGESIZE
    there = (ctypes.c_ubyte * (end - first))()
    length = ctypes.c_size_t((end - first) * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first * mmap.PAGESIZE), length, there) == 0
    return [bool(page & 1) for page in there]


def test_store_pages_are_faulted_in_before_pinning(driver: Driver) -> None:
    """Pages that the driver would have to ask for take it four times as long."""
    seen: list[bool] = []

    def register(address: int, size: int, flags: int) -> int:
        seen.extend(_pages(address, size))
        return Driver.cudaHostRegister(driver, address, size, flags)

    with patch.object(driver, "cudaHostRegister", register):
        store()._pin(3 * offload._TOUCHED + 5)
    assert len(seen) * mmap.PAGESIZE > 2 * offload._TOUCHED
    assert all(seen)


def test_store_block_of_up_to_twice_the_size_is_reused(driver: Driver) -> None:
    pool = store()
    pool.reserve([1024, 4096])
    assert pool._take(1000).memory.nbytes == 1024
    # The other block is four times what is wanted: it waits for something larger.
    assert pool._take(1000).memory.nbytes == 1000
    assert pool._take(4000).memory.nbytes == 4096
    assert pool.pinned == 1024 + 1000 + 4096


def test_store_many_sizes_stay_below_spare(driver: Driver) -> None:
    pool, layers, longest = store(), 8, 0
    for size in (1000, 1100, 1200, 400, 1300, 300, 1400, 1500, 200, 1600):
        blocks = [pool._take(size) for _ in range(layers)]
        assert all(block.memory.nbytes >= size for block in blocks)
        longest = max(longest, size)
        assert pool.pinned <= offload.SPARE * layers * longest
        assert sum(driver.held.values()) == pool.pinned
        pool.free += blocks
        blocks.clear()


def test_store_reserve_replaces_free_blocks(driver: Driver) -> None:
    pool = store()
    pool.reserve([512, 512])
    used = pool._take(512)
    pool.reserve([2048])
    assert sorted(driver.held.values()) == [512, 2048]
    assert pool.pinned == 512 + 2048
    pool.close()
    assert list(driver.held) == [used.memory.data_ptr()]
    assert pool.pinned == 512


def test_store_dropped_unpins_blocks(driver: Driver) -> None:
    pool = store()
    pool.reserve([512, 2048])
    ticket = Ticket(pool, None, pool._take(2048), [])
    del pool
    assert sorted(driver.held.values()) == [512, 2048]
    del ticket
    assert not driver.held


def test_store_in_reference_cycle_unpins_blocks(driver: Driver) -> None:
    pool = store()
    pool.reserve([512, 2048])
    ticket = Ticket(pool, None, pool._take(2048), [])
    pool.staged.append(ticket)
    del pool, ticket
    gc.collect()
    assert not driver.held


def test_store_on_cpu_keeps_tensors() -> None:
    kept: list[Tensor] = [torch.ones(3)]
    ticket = HostStore(torch.device("cpu")).put(kept)
    assert ticket.get()[0] is kept[0]
