"""The norm of sharded gradients, and steps clipped by it or left out: as torch's own, plain, sharded and replicated."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.state.optimizer import clipping
from ithaca.state.optimizer.clipping import clipped_step, gradient_norm
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import run_ranks
from tests.tolerances import FAULT, FP64, NORM_BY_BLOCKS, NORM_RATIO

CLIP = 0.01
BATCH = small_batch(4, 24)


def made(fused: bool) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """A model with gradients, its optimizer and its loss, on one process."""
    model = small_model("llama")
    with compute_in_fp64():
        loss = model(**BATCH).loss
        loss.backward()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused), loss.detach()


def whole(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = dict(model.named_parameters())
    return {
        key: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()  # type: ignore[attr-defined]
        for key, p in state.items()
    }


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [CLIP, 1e9, 0.0])
def test_clipped_step_equals_torchs(clip: float, fused: bool) -> None:
    model, optimizer, loss = made(fused)
    other, others, _ = made(fused)
    norm = gradient_norm(model.parameters(), torch.device("cpu"))
    assert norm is not None
    wanted = nn.utils.clip_grad_norm_(other.parameters(), clip or float("inf"))
    assert float(norm) == pytest.approx(float(wanted), rel=FP64)
    assert float(norm) > 10 * CLIP, "clipping must bite for this to mean anything"
    clipped_step(optimizer, norm, loss, clip)
    others.step()
    ours, theirs = whole(model), whole(other)
    # The fused kernel takes its factor in fp32.
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < FAULT
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("clip", [CLIP, 1e9, 0.0])
def test_clipped_step_writes_gradients_only_if_clipping(clip: float) -> None:
    model, optimizer, loss = made(fused=True)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for number in (1, 2):
        norm = gradient_norm(model.parameters(), torch.device("cpu"))
        clipped_step(optimizer, norm, loss, clip / number)
        assert {float(state["step"]) for state in optimizer.state.values()} == {number}
    kept = [torch.equal(before, p.grad) for before, p in zip(grads, model.parameters(), strict=True)]  # type: ignore[arg-type]
    assert all(kept) == (clip != CLIP)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_step_not_finite_changes_nothing(bad: str, fused: bool) -> None:
    model, optimizer, loss = made(fused)
    norm = gradient_norm(model.parameters(), torch.device("cpu"))
    clipped_step(optimizer, norm, loss, CLIP)
    before, state = whole(model), copy.deepcopy(optimizer.state_dict())
    if bad == "gradient":
        next(model.parameters()).grad.view(-1)[3] = float("inf")  # type: ignore[union-attr]
    norm = gradient_norm(model.parameters(), torch.device("cpu"))
    clipped_step(optimizer, norm, loss if bad == "gradient" else loss * float("nan"), CLIP)
    after = whole(model)
    assert all(torch.equal(before[key], after[key]) for key in before)
    for place, kept in state["state"].items():
        assert all(torch.equal(kept[name], value) for name, value in optimizer.state_dict()["state"][place].items())


def test_norm_without_gradients_is_none() -> None:
    assert gradient_norm(small_model("llama").parameters(), torch.device("cpu")) is None


def test_norm_of_bf16_gradients_is_fp32_exact() -> None:
    generator = torch.Generator().manual_seed(4)
    model = small_model("llama", dtype=torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p)
    exact = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]
    norm = gradient_norm(model.parameters(), torch.device("cpu"))
    assert norm is not None
    assert float(norm) == pytest.approx(float(exact), rel=NORM_RATIO)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [4_000_000, 2**22 + 513, 700, 3])
def test_norm_of_many_gradients_on_cpu_has_seven_digits(size: int, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(size, dtype=dtype))
    weight.grad = torch.randn(size, generator=torch.Generator().manual_seed(4)).to(dtype)
    exact = weight.grad.double().norm()
    norm = gradient_norm([weight], torch.device("cpu"))
    assert norm is not None
    assert float(norm) == pytest.approx(float(exact), rel=NORM_BY_BLOCKS)


def sharded(sp: int, replicas: int, counts_copies: bool = False) -> tuple[float, dict[str, Tensor]]:
    mesh = init_mesh(sp=sp)
    model = parallelize(small_model("llama"), mesh, replicas=replicas)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    rows = {name: value[mesh.dp_rank :: mesh.dp] for name, value in BATCH.items()}
    with compute_in_fp64():
        loss = causal_loss(model, rows, mesh)
        loss.backward()
    with patch.object(clipping, "_summed", _everywhere if counts_copies else clipping._summed):
        norm = gradient_norm(model.parameters(), mesh.device)
    assert norm is not None
    clipped_step(optimizer, norm, loss.detach(), CLIP)
    return float(norm), whole(model)


def _everywhere(key: Any, square: Tensor) -> Tensor:
    """Planted: copies of a shard are counted as if they were other shards."""
    for dim in range(len(key[1])):
        torch.distributed.all_reduce(square, group=key[0].get_group(dim))
    return square


@pytest.mark.few(2)
@pytest.mark.parametrize(("sp", "world", "replicas"), [(2, 2, 1), (2, 4, 1), (2, 4, 2)])
def test_norm_of_shards_equals_whole(sp: int, world: int, replicas: int) -> None:
    model, optimizer, loss = made(fused=True)
    norm = gradient_norm(model.parameters(), torch.device("cpu"))
    assert norm is not None
    clipped_step(optimizer, norm, loss, CLIP)
    wanted = whole(model)
    for got, weights in run_ranks(world, sharded, sp, replicas):
        assert got == pytest.approx(float(norm), rel=NORM_RATIO)
        assert max(float((weights[key] - wanted[key]).abs().max()) for key in wanted) < FAULT


def test_norm_counting_copies_twice_is_detected() -> None:
    model, _, _ = made(fused=True)
    norm = gradient_norm(model.parameters(), torch.device("cpu"))
    assert norm is not None
    assert run_ranks(4, sharded, 2, 2, counts_copies=True)[0][0] > 1.1 * float(norm)
