"""Tests of the pool of ranks: its results, the processes that it keeps, and its failures."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import REUSE, RankError, expect_refusal, run_ranks


def whoami(tag: str, *, suffix: str = "") -> tuple[int, int, str]:
    return dist.get_rank(), dist.get_world_size(), tag + suffix


def process_id() -> int:
    return os.getpid()


def reduced(x_D: torch.Tensor) -> torch.Tensor:
    y_D = x_D * (dist.get_rank() + 1)
    dist.all_reduce(y_D)
    return y_D


def draw() -> float:
    return torch.rand(()).item()


def surroundings() -> tuple[int, str, str]:
    return torch.get_num_threads(), os.environ["HF_HUB_OFFLINE"], os.environ["WORLD_SIZE"]


def fail_on(rank: int, *, in_subgroup: bool = False) -> None:
    group = dist.new_group(list(range(dist.get_world_size()))) if in_subgroup else None
    if dist.get_rank() == rank:
        raise KeyError(f"planted on {rank}")
    dist.all_reduce(torch.ones(1), group=group)


def sleep_on(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


def fail_beside_sleep() -> None:
    if dist.get_rank() == 0:
        raise KeyError("planted")
    time.sleep(60)


def refuse(message: str) -> None:
    raise ValueError(message)


def refuse_differently() -> None:
    raise ValueError("no") if dist.get_rank() == 0 else TypeError("no")


def give_unpicklable() -> object:
    return lambda: None


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def test_results_are_in_rank_order() -> None:
    assert run_ranks(3, whoami, "a", suffix="b") == [(0, 3, "ab"), (1, 3, "ab"), (2, 3, "ab")]


def test_all_reduce_and_tensors_travel() -> None:
    for y_D in run_ranks(4, reduced, torch.arange(5.0)):
        torch.testing.assert_close(y_D, torch.arange(5.0) * 10)


def test_call_starts_from_one_seed_and_one_thread() -> None:
    assert len({*run_ranks(2, draw), *run_ranks(2, draw)}) == 1
    assert run_ranks(2, surroundings) == [(1, "1", "2")] * 2


def test_changed_world_keeps_processes() -> None:
    two, four, again = (run_ranks(world, process_id) for world in (2, 4, 2))
    assert two == again == four[:2]
    assert len(set(four)) == 4
    assert run_ranks(2, reduced, torch.ones(1)) == [torch.tensor([3.0])] * 2


@pytest.mark.slow
def test_rejoined_group_keeps_processes() -> None:
    assert len({tuple(run_ranks(2, process_id)) for _ in range(REUSE + 2)}) == 1


@pytest.mark.parametrize("in_subgroup", [False, True])
def test_failing_rank_is_named_and_the_next_call_works(in_subgroup: bool) -> None:
    before = run_ranks(4, process_id)
    with pytest.raises(RankError, match="rank 2 raised KeyError: 'planted on 2'") as caught:
        run_ranks(4, fail_on, 2, in_subgroup=in_subgroup)
    assert caught.value.rank == 2
    assert caught.value.exceptions[2].error == "KeyError"
    assert "in fail_on" in str(caught.value)
    assert run_ranks(4, reduced, torch.ones(1)) == [torch.tensor([10.0])] * 4
    assert run_ranks(4, process_id) == before, "no rank was silent for so long that it was killed"


@pytest.mark.slow
def test_rank_silent_after_a_failure_is_killed() -> None:
    before = run_ranks(2, process_id)
    with pytest.raises(RankError, match="rank 0 raised KeyError") as caught:
        run_ranks(2, fail_beside_sleep)
    assert caught.value.exceptions[1].error == "TimeoutError"
    assert not set(before) & set(run_ranks(2, process_id))


@pytest.mark.slow
def test_hanging_rank_ends_with_the_timeout() -> None:
    with pytest.raises(RankError, match="rank 1 raised TimeoutError: no answer") as caught:
        run_ranks(2, sleep_on, 1, 60, timeout=0.5)
    assert list(caught.value.exceptions) == [1]


@pytest.mark.slow
def test_dead_rank_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 1 raised WorkerDied: .* exit status 7"):
        run_ranks(2, die)
    assert len(run_ranks(2, process_id)) == 2


@pytest.mark.slow
def test_refusal_on_all_ranks_keeps_processes() -> None:
    before = run_ranks(4, process_id)
    exceptions = expect_refusal(4, refuse, "8 heads over sp=16", error="ValueError", match=r"sp=\d+")
    assert [str(exceptions[rank]) for rank in range(4)] == ["ValueError: 8 heads over sp=16"] * 4
    assert run_ranks(4, process_id) == before


def test_unpicklable_result_fails_its_rank() -> None:
    with pytest.raises(RankError, match="give_unpicklable"):
        run_ranks(2, give_unpicklable)


def test_expect_refusal_without_refusal_fails() -> None:
    with pytest.raises(AssertionError, match="no rank of 2 raised"):
        expect_refusal(2, process_id, error="ValueError", match="")
    with pytest.raises(AssertionError, match=r"rank 1 of 2: expected ValueError .* raised TypeError"):
        expect_refusal(2, refuse_differently, error="ValueError", match="no")
    with pytest.raises(AssertionError, match="matching 'sp=8'"):
        expect_refusal(2, refuse, "sp=4", error="ValueError", match="sp=8")


@pytest.mark.parametrize("world", [0, 9])
def test_world_out_of_range_is_refused(world: int) -> None:
    with pytest.raises(ValueError, match=f"world={world}: the pool has between 1 and 8 ranks"):
        run_ranks(world, process_id)
