"""Work on one rank, or on each, whose result or error reaches all ranks.

                                   rank 0        rank 1        result on every rank
    on_rank_0(read, group)         read()                      text, or rank 0's error
    on_all_ranks(write, group)     write()       write()       [sum 0, sum 1], or the first rank's error
    gather_objects(free, group)    free 0        free 1        [free 0, free 1]

Without this a rank that fails alone leaves the others waiting in their next collective. Results and errors travel
pickled. `failed` maps an exception to the error that all ranks raise. It may also raise: then the rank ends alone, the
others fail in the collective, and the launcher prints the first cause. `group=None` is the default group; without a
process group, this process is rank 0 of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ithaca.errors import IthacaError

T = TypeVar("T")
Failed = Callable[[Exception], Exception]


def only_refusals(error: Exception) -> Exception:
    """Return an error that the user can mend; raise any other again."""
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

    `alone`: run `action` in this process and skip the broadcast, whatever other ranks there are.
    """
    single = alone or not dist.is_initialized()
    cause: Exception | None = None
    answer: list[Any] = [None, None]  # result, error
    if single or dist.get_rank() == 0:
        try:
            answer[0] = action()
        except Exception as error:
            cause = error
            answer[1] = failed(error)
    if not single:
        dist.broadcast_object_list(answer, src=0, group=group)
    _raise(answer[1], cause)
    result: T = answer[0]
    return result


def on_all_ranks(
    action: Callable[[], T], group: dist.ProcessGroup | None = None, *, failed: Failed = only_refusals
) -> list[T]:
    """Run `action` on every rank; return all results in rank order, or raise the first failed rank's error on all."""
    result: T | None = None
    cause: Exception | None = None
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        cause = error
        problem = failed(error)
    answers: list[Any] = gather_objects((result, problem), group)
    _raise(next((error for _, error in answers if error is not None), None), cause)
    return [each for each, _ in answers]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _raise(error: Exception | None, cause: Exception | None) -> None:
    """Raise `error`, if any; on the rank where it began, from its cause, so that the traceback leads there."""
    if error is None:
        return
    if cause is None or error is cause:
        raise error
    raise error from cause
