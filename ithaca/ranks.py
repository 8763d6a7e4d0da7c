"""Work that one rank does for all, such as writing a file: every rank gets the result, or every rank raises the error.

    text = on_rank_0(lambda: file.read_text(), group)    # rank 0 reads, every rank has the text
    sums = on_all_ranks(lambda: write_part(), group)     # every rank writes; if one fails, all raise
    free = gather_objects(free_memory(), group)          # a value of every rank

Results and errors travel pickled. `failed` turns an exception into the error that all ranks raise, or raises: then that
rank alone ends, the others fail in the collective, and the launcher shows the first cause. A group of None is the default
one; without a process group this process is all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ithaca.errors import IthacaError

T = TypeVar("T")
Failed = Callable[[Exception], Exception]


def only_refusals(error: Exception) -> Exception:
    """Return an error that is the user's to mend; raise any other again."""
    if isinstance(error, IthacaError):
        return error
    raise error


def on_rank_0(
    action: Callable[[], T],
    group: dist.ProcessGroup | None = None,
    *,
    failed: Failed = only_refusals,
    alone: bool = False,
) -> T:
    """Run `action` on rank 0; return its result on every rank, or raise its error there.

    `alone`: this process runs it for itself, whatever other ranks there are.
    """
    single = alone or not dist.is_initialized()
    cause: Exception | None = None
    told: list[Any] = [None, None]
    if single or dist.get_rank() == 0:
        try:
            told[0] = action()
        except Exception as error:
            cause = error
            told[1] = failed(error)
    if not single:
        dist.broadcast_object_list(told, src=0, group=group)
    _raise(told[1], cause)
    result: T = told[0]
    return result


def on_all_ranks(
    action: Callable[[], T], group: dist.ProcessGroup | None = None, *, failed: Failed = only_refusals
) -> list[T]:
    """Run `action` on every rank; return the results in the ranks' order, or raise the first rank's error on all."""
    result: T | None = None
    cause: Exception | None = None
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        cause = error
        problem = failed(error)
    everyone: list[Any] = gather_objects((result, problem), group)
    _raise(next((said for _, said in everyone if said is not None), None), cause)
    return [each for each, _ in everyone]


def gather_objects(said: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what each rank passes, in the ranks' order, on every rank."""
    if not dist.is_initialized():
        return [said]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, said, group=group)
    return gathered


def _raise(error: Exception | None, cause: Exception | None) -> None:
    if error is None:
        return
    if cause is None or error is cause:
        raise error
    raise error from cause
