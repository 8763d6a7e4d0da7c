"""Raw rows to tokens in batches: in this process, or in a pool of processes that ends with this one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any

from ithaca.data.sources.read_records import RawRow, parse_row
from ithaca.data.tokens.encode import Encoded, Encoder
from ithaca.errors import DataError, RowError
from ithaca.exit_codes import FAILED

_BATCH_ROWS = 128
# A tokenizer needs about a hundred bytes of memory for each byte of its input.
_BATCH_BYTES = 1 << 19


def encode_batch(
    batch: list[RawRow], encoder: Encoder, progress: Callable[[int], None] | None = None
) -> list[tuple[RawRow, Encoded | RowError]]:
    """Parse and tokenize some rows together; return the answers in order. The rows in `batch` lose their values."""
    parsed: list[Any] = []
    for at, raw in enumerate(batch):
        try:
            parsed.append(parse_row(raw))
        except RowError as error:
            parsed.append(error)
        batch[at] = raw = RawRow(raw.file, raw.row, None, raw.size)
    found = iter(encoder([record for record in parsed if not isinstance(record, RowError)], progress))
    answers = [record if isinstance(record, RowError) else next(found) for record in parsed]
    return list(zip(batch, answers, strict=True))


def encode_rows(
    rows: Iterable[RawRow], encoder: Encoder, workers: int, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[RawRow, Encoded | RowError]]:
    """Yield all rows with their answers, in order. `workers` above 1: a pool of processes, without `progress`."""
    if workers == 1:
        for batch in batches(rows):
            yield from encode_batch(batch, encoder, progress)
        return
    try:
        # spawn: a fork of a process with torch's threads may deadlock.
        with ProcessPoolExecutor(workers, get_context("spawn"), follow_parent) as pool:
            waiting: list[Future[list[tuple[RawRow, Encoded | RowError]]]] = []
            for batch in batches(rows):
                with _blocked(signal.SIGINT):
                    waiting.append(pool.submit(encode_batch, batch, encoder))
                # A few batches for each worker keep all busy, and bound the memory.
                if len(waiting) > 2 * workers:
                    yield from waiting.pop(0).result()
            for future in waiting:
                yield from future.result()
    except BrokenProcessPool:
        raise DataError(
            f"one of the {workers} processes that tokenize was ended (the kernel does that when the machine's memory is "
            "full: look at `dmesg`): set data.workers to fewer"
        ) from None


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """Block a signal for processes started inside, from their first moment; this process gets it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """End this process when the one that started it ends."""
    parent = parent_process()
    assert parent is not None, "made by a pool"

    # The sentinel becomes readable when the parent ends, even by SIGKILL.
    def follow() -> None:
        wait([parent.sentinel])
        os._exit(FAILED)

    threading.Thread(target=follow, daemon=True).start()


def batches(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Yield rows in batches of a hundred or so, fewer if the rows are long."""
    batch: list[RawRow] = []
    size = 0
    for raw in rows:
        batch.append(raw)
        size += raw.size
        if size >= _BATCH_BYTES or len(batch) == _BATCH_ROWS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
