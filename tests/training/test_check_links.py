"""The check of all collectives: right on healthy links, and it names what is wrong on others."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.mesh import init_mesh
from ithaca.training.check_links import check_collectives
from tests.ranks import RankError, expect_refusal, run_ranks


def _check(degrees: tuple[int, int]) -> None:
    check_collectives(init_mesh(dp=degrees[0], sp=degrees[1]))


@pytest.mark.parametrize("degrees", [(1, 1), (1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_links_healthy_pass(degrees: tuple[int, int]) -> None:
    run_ranks(degrees[0] * degrees[1], _check, degrees)


def _broken(name: str, how: str) -> None:
    mesh = init_mesh(sp=2)
    true = getattr(dist, name)

    def false(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if how == "silent" and mesh.rank == 1:
            time.sleep(3)
            raise RuntimeError("this rank never came")
        done = true(first, *args, **kwargs)
        if how == "shifted":
            first.copy_(first.roll(1))
        if how == "lost" and first.dtype == torch.int64:
            first.zero_()
        return done

    with patch.object(dist, name, false):
        check_collectives(mesh, seconds=1.0 if how == "silent" else 60.0)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("all_to_all_single", r"all_to_all_single \(even\)"),
        ("all_gather_into_tensor", "all_gather_into_tensor"),
        ("reduce_scatter_tensor", "reduce_scatter_tensor"),
        ("all_reduce", r"all_reduce \(sum\)"),
    ],
)
def test_a_wrong_answer_is_named(name: str, operation: str) -> None:
    expect_refusal(2, _broken, name, "shifted", error="LinkError", match=f"{operation} of float32 in the sp group of 2")


def test_a_wrong_answer_in_one_kind_of_number_only() -> None:
    expect_refusal(2, _broken, "broadcast", "lost", error="LinkError", match="broadcast of int64 in the sp group")


def test_links_silent_rank_names_operation() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _broken, "all_to_all_single", "silent")
    for raised in caught.value.exceptions.values():
        assert raised.error == "LinkError"
        assert (
            "all_to_all_single (even) of float32 in the sp group of 2 ranks had no answer within 1 s" in raised.message
        )
