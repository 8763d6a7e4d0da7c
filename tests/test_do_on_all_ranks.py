"""Tests of `ithaca.ranks`: rank 0's result or error reaches every rank, and every rank's reaches all."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ithaca.errors import CheckpointError, DataError
from ithaca.ranks import gather_objects, on_all_ranks, on_rank_0
from tests.ranks import RankError, run_ranks


def refuse(on: int) -> int:
    rank = dist.get_rank()
    if rank >= on:
        raise DataError(f"rank {rank} refuses")
    return rank


def caught(everywhere: bool, on: int) -> tuple[type, str, bool]:
    """Type and message of the error that this rank raises, and whether a collective after it still matches."""
    try:
        (on_all_ranks if everywhere else on_rank_0)(lambda: refuse(on))
    except Exception as error:
        return type(error), str(error), gather_objects(dist.get_rank()) == [0, 1, 2]
    raise AssertionError("nothing was raised")


def renamed() -> str:
    def failed(error: Exception) -> Exception:
        return CheckpointError(f"not written: {error}")

    def write() -> None:
        raise OSError("the disk is full")

    with pytest.raises(CheckpointError) as raised:
        on_rank_0(write, failed=failed)
    assert isinstance(raised.value.__cause__, OSError) == (dist.get_rank() == 0)
    return str(raised.value)


def results() -> tuple[int, list[int], list[int], list[int]]:
    group = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    first = on_rank_0(lambda: rank + 10, group)
    alone = [rank] if rank == 0 else on_rank_0(lambda: [rank], alone=True)
    return first, on_all_ranks(lambda: rank * rank, group), gather_objects(rank, group), alone


def break_down() -> None:
    def fault() -> None:
        raise ZeroDivisionError("a bug of rank 0")

    on_rank_0(fault)


def test_results_of_rank_0_and_of_all_reach_every_rank() -> None:
    assert run_ranks(3, results) == [(10, [0, 1, 4], [0, 1, 2], [rank]) for rank in range(3)]


@pytest.mark.parametrize("everywhere", [False, True])
def test_error_of_rank_0_is_raised_on_all_with_its_type(everywhere: bool) -> None:
    assert run_ranks(3, caught, everywhere, 0) == [(DataError, "rank 0 refuses", True)] * 3


def test_error_of_another_rank_is_raised_on_all() -> None:
    assert run_ranks(3, caught, True, 1) == [(DataError, "rank 1 refuses", True)] * 3


def test_error_is_mapped_by_failed() -> None:
    assert run_ranks(2, renamed) == ["not written: the disk is full"] * 2


def test_internal_error_ends_its_rank_alone() -> None:
    with pytest.raises(RankError, match="a bug of rank 0"):
        run_ranks(2, break_down)


def test_process_without_group_runs_alone() -> None:
    assert on_rank_0(lambda: 3) == 3
    assert on_all_ranks(lambda: 4) == [4]
    assert gather_objects(5) == [5]
    with pytest.raises(DataError):
        on_rank_0(lambda: (_ for _ in ()).throw(DataError("no")))
