"""Shards of one row draw numbers of their own; the caller's generators stay in step on all ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.loss.causal import causal_loss
from ithaca.memory.random_state import ShardRng
from ithaca.mesh import init_mesh
from ithaca.models.binding_state import Binding
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import run_ranks

CPU = torch.device("cpu")
DROPPED = {"attn_pdrop": 0.0, "resid_pdrop": 0.3, "embd_pdrop": 0.2}
NOTHING = dict.fromkeys(DROPPED, 0.0)
MEMORIES = {"none": None} | {mode: MemoryPlan((mode,) * 2, (False,) * 2, 5, 7) for mode in ("keep", "save")}


def dropout_masks(sp: int, memory: str, passes: int = 2) -> tuple[list[Tensor], Tensor]:
    """Return the embeddings' dropout mask of each pass and the last generator state; one seed on all ranks."""
    mesh = init_mesh(sp=sp)
    model = parallelize(small_model("gpt2", **DROPPED), mesh, memory=MEMORIES[memory]).train()
    masks: list[Tensor] = []
    model.transformer.drop.register_forward_hook(lambda module, args, output: masks.append(output == 0))
    torch.manual_seed(5)
    for _ in range(passes):
        causal_loss(model, small_batch(1, 12), mesh).backward()
    return masks, torch.get_rng_state()


@pytest.mark.parametrize("memory", list(MEMORIES))
def test_shard_rng_dropout_differs_by_shard(memory: str) -> None:
    (first, state), (second, other) = run_ranks(2, dropout_masks, 2, memory)
    assert torch.equal(state, other)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # A second pass draws anew.
    assert not torch.equal(first[0], first[1])


def _not_apart() -> tuple[list[Tensor], Tensor]:
    with patch.object(Binding, "begin_drawing", lambda self: None):
        return dropout_masks(2, "none")


def test_shard_rng_removed_equal_masks_are_detected() -> None:
    (first, _), (second, _) = run_ranks(2, _not_apart)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _like_plain() -> bool:
    """One process draws what plain transformers draws."""
    mesh = init_mesh(sp=1)
    found = []
    for parallel in (False, True):
        model = small_model("gpt2", **DROPPED)
        model = parallelize(model, mesh, memory=None) if parallel else model
        torch.manual_seed(5)
        batch = small_batch(1, 12)
        loss = causal_loss(model, batch, mesh) if parallel else model(**batch).loss
        found.append((round(float(loss), 4), torch.get_rng_state()))
    return found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_shard_rng_one_process_draws_as_plain_model() -> None:
    assert run_ranks(1, _like_plain) == [True]


def _untouched(train: bool, dropped: bool) -> bool:
    """True if a pass that draws nothing leaves the caller's generator unchanged."""
    mesh = init_mesh(sp=2)
    model = parallelize(small_model("gpt2", **(DROPPED if dropped else NOTHING)), mesh).train(train)
    before = torch.get_rng_state()
    causal_loss(model, small_batch(1, 12), mesh)
    return torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("train", "dropped", "same"), [(True, False, True), (False, True, True), (True, True, False)])
def test_shard_rng_end_advances_generator_only_after_draws(train: bool, dropped: bool, same: bool) -> None:
    assert run_ranks(2, _untouched, train, dropped) == [same, same]


def _after_an_error() -> bool:
    mesh = init_mesh(sp=2)
    model: Any = parallelize(small_model("gpt2", **DROPPED), mesh, memory=None).train()

    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("planted")

    handle = model.transformer.ln_f.register_forward_pre_hook(fail)
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="planted"):
        causal_loss(model, small_batch(1, 12), mesh)
    handle.remove()
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(2)]
    dist.all_gather(states, torch.get_rng_state())
    return torch.equal(*states)


def test_shard_rng_after_error_ranks_have_equal_states() -> None:
    assert run_ranks(2, _after_an_error) == [True, True]


def _unequal_experts() -> Tensor:
    """Rank 0 draws in its pass and rank 1 does not, as where no token of a shard chose the expert with a dropout."""
    mesh = init_mesh(sp=2)
    torch.manual_seed(5)
    rng = ShardRng(CPU, mesh.sequence_rank)
    if mesh.rank == 0:
        torch.rand(3)
    rng.end(drew=True)
    return torch.get_rng_state()


def test_shard_rng_one_rank_drew_ranks_have_equal_states() -> None:
    first, second = run_ranks(2, _unequal_experts)
    assert torch.equal(first, second)
