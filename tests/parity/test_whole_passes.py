"""A parallelized model run whole, `unsharded` or unbound: its gradients are the plain model's, whenever backward comes.

FSDP2 sums gradients of shards and averages those of whole sequences; every way between the two is gone here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ithaca.errors import UnsupportedError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import Mesh, init_mesh
from ithaca.models.binding import unbind
from ithaca.models.bound import binding_of, unsharded
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import LayerMode, MemoryPlan
from ithaca.sequence.batch import shard_batch
from ithaca.state.weights import placement as placement
from ithaca.verify.fp64 import promoted
from ithaca.verify.parity import gradient_errors
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FAULT, FP64

REPLAYED = MemoryPlan(("save",) * 2, (False,) * 2, 8, 8)
Batch = dict[str, Tensor]


def backward_inside(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    with unsharded(model):
        model(**batch).loss.backward()


def backward_outside(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    with unsharded(model):
        loss = model(**batch).loss
    loss.backward()


def own_loss(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    """The same loss, made of the logits by the caller."""
    with unsharded(model):
        logits = model(input_ids=batch["input_ids"]).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()


def after_a_sharded_step(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    causal_loss(model, batch, mesh).backward()
    model.zero_grad()
    backward_inside(model, batch, mesh)


def unbound(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    unbind(model)
    model(**batch).loss.backward()


def sharded_after_whole(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    backward_inside(model, batch, mesh)
    model.zero_grad()
    causal_loss(model, batch, mesh).backward()


def sharded_around_whole(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    """Its forward before, its backward after."""
    loss = causal_loss(model, batch, mesh)
    backward_inside(model, batch, mesh)
    model.zero_grad()
    loss.backward()


WAYS: list[Callable[[nn.Module, Batch, Mesh], None]] = [
    backward_inside, backward_outside, own_loss, after_a_sharded_step, unbound, sharded_after_whole, sharded_around_whole,
]  # fmt: skip


def _batch() -> Batch:
    batch = small_batch(2, 16)
    return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


def _error(way: Callable[[nn.Module, Batch, Mesh], None], **options: Any) -> float:
    mesh = init_mesh(sp=2)
    model, batch = small_model("llama"), _batch()
    with promoted():
        expected = reference(copy.deepcopy(model), [[batch]])
        parallel = parallelize(model, mesh, **options)
        way(parallel, batch, mesh)
    return max(gradient_errors(parallel, expected.gradients).values())


@pytest.mark.few(6)
@pytest.mark.parametrize("weights", ["shard", "replicate"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_unsharded_gradients_equal_the_plain_model(way: Callable[..., None], weights: str) -> None:
    assert max(run_ranks(2, _error, way, weights=weights)) < FP64


@pytest.mark.slow
@pytest.mark.parametrize("way", [backward_outside, unbound], ids=lambda way: way.__name__)
def test_unsharded_replicas_gradients_equal_the_plain_model(way: Callable[..., None]) -> None:
    assert max(run_ranks(4, _error, way, replicas=2)) < FP64


@pytest.mark.parametrize("way", [backward_inside, unbound], ids=lambda way: way.__name__)
def test_unsharded_replay_gradients_equal_the_plain_model(way: Callable[..., None]) -> None:
    assert max(run_ranks(2, _error, way, memory=REPLAYED)) < FP64


def _routed(kind: str, mode: LayerMode, sharded: bool) -> tuple[float, int, list[int]]:
    """The worst gradient of a pass with an auxiliary loss, how many router logits it gave, and how many are left behind."""
    mesh, batch = init_mesh(sp=1), _batch()
    plain = small_model(kind, router_aux_loss_coef=1.0)
    expected = plain(**batch, output_router_logits=True)
    expected.loss.backward()
    model: Any = small_model(kind, router_aux_loss_coef=1.0)
    model = parallelize(model, mesh, memory=MemoryPlan((mode,) * 2, (False,) * 2, 8, 8), weights="none")
    if sharded:
        given = model(**shard_batch(batch, mesh).inputs, output_router_logits=True)
    with unsharded(model):
        given = model(**batch, output_router_logits=True)
        given.loss.backward()
        with torch.no_grad():
            model(**batch, output_router_logits=True)
    installed: Any = binding_of(model).memory
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    worst = max(gradient_errors(model, wanted).values())
    return worst, len(given.router_logits), [len(runner.router_logits) for runner in installed.runners]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_unsharded_router_logits_are_the_routers_own(kind: str) -> None:
    [(worst, logits, left)] = run_ranks(1, _routed, kind, "keep", False)
    assert (logits, left) == (2, [0, 0])
    assert worst < FP64


@pytest.mark.parametrize(("mode", "sharded"), [("save", False), ("keep", True)])
def test_unsharded_router_logits_without_gradient_are_refused(mode: str, sharded: bool) -> None:
    match = "router logits would have no gradient here"
    expect_refusal(1, _routed, "mixtral", mode, sharded, error="UnsupportedError", match=match)


def _always_summed(way: Callable[[nn.Module, Batch, Mesh], None]) -> float:
    with patch.object(placement.Placement, "choose", lambda self, *, summed: None):
        return _error(way)


@pytest.mark.parametrize("way", [backward_outside, unbound], ids=lambda way: way.__name__)
def test_unsharded_planted_sum_is_seen(way: Callable[..., None]) -> None:
    assert min(run_ranks(2, _always_summed, way)) > FAULT


def sharded_inside(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    loss = causal_loss(model, batch, mesh)
    with unsharded(model):
        loss.backward()


def sharded_after_unbind(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    loss = causal_loss(model, batch, mesh)
    unbind(model)
    loss.backward()


def both_at_once(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    with unsharded(model):
        whole = model(**batch).loss
    (whole + causal_loss(model, batch, mesh)).backward()


def with_a_cache(model: nn.Module, batch: Batch, mesh: Mesh) -> None:
    with unsharded(model):
        model(**batch, past_key_values=DynamicCache(config=model.config))


REFUSED = [
    (with_a_cache, {"memory": REPLAYED}, "past_key_values was passed .* torch.no_grad"),
    (backward_outside, {"weights": "replicate", "memory": REPLAYED}, "call backward inside the `with` too"),
    (sharded_inside, {"memory": REPLAYED}, "call backward outside the `with` too"),
    (sharded_after_unbind, {}, "call it before unbind"),
    (both_at_once, {}, "call backward on each loss by itself"),
]


@pytest.mark.parametrize(("way", "options", "match"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_backward_across_unsharded_is_refused(way: Callable[..., None], options: dict[str, Any], match: str) -> None:
    expect_refusal(2, _error, way, error="UnsupportedError", match=match, **options)


def test_backward_inside_unsharded_without_replay_is_exact() -> None:
    assert max(run_ranks(2, _error, sharded_inside, memory=None)) < FP64


def _goes_on() -> bool:
    """After a refused backward the next step is as if it had not been, loss and gradients to the bit."""
    mesh, batch, steps = init_mesh(sp=2), _batch(), []
    model = parallelize(small_model("llama", dtype=torch.float32), mesh, memory=REPLAYED)
    for refused in (False, True):
        if refused:
            with pytest.raises(UnsupportedError):
                backward_outside(model, batch, mesh)
        model.zero_grad()
        loss = causal_loss(model, batch, mesh)
        loss.backward()
        steps.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])
    return all(torch.equal(before, after) for before, after in zip(*steps, strict=True))


def test_step_after_a_refused_backward_is_the_same() -> None:
    assert all(run_ranks(2, _goes_on))
