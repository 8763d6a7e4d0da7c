"""The optimizer's step inside backward: every bit as the step after it, and refused beside what needs all gradients.

Over plain, sharded, copied and tied weights, experts, and every memory mode: a layer that is run again in backward
must not be stepped before its weights have done their work.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ithaca.errors import UnsupportedError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import LayerMode, MemoryPlan
from ithaca.state.optimizer.build import build_optimizer
from ithaca.state.weights.placement import WeightOptions, place_weights
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.state.optimizer.test_build import DTYPE, SETTINGS, WIDE, local, matrix, uncompiled


def _run(name: str, in_backward: bool, kind: str, modes: tuple[LayerMode, ...], options: dict[str, Any]) -> Any:
    """The weights after three steps, and how many gradients were there after backward."""
    mesh = init_mesh(sp=dist.get_world_size())
    sizes = WIDE if name == "adamw8bit" else {"tie_word_embeddings": kind == "llama"}
    small = small_model(kind, dtype=DTYPE[name], num_hidden_layers=len(modes), **sizes)
    memory = MemoryPlan(modes, tuple(mode != "keep" for mode in modes), 5, 4)
    model = parallelize(small, mesh, memory=memory, **options)
    optimizer = build_optimizer(model, name, in_backward=in_backward, **SETTINGS)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    left = 0
    with uncompiled():
        for seed in range(3):
            causal_loss(model, small_batch(1, 24, seed=seed), mesh).backward()
            left = sum(p.grad is not None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return [local(p).detach().clone() for p in model.parameters()], left


CASES: dict[str, tuple[str, int, str, tuple[LayerMode, ...], dict[str, Any]]] = {
    "one rank": ("adamw", 1, "qwen2", ("keep", "keep"), {}),
    "one rank, every mode, tied": ("adamw", 1, "llama", ("save", "rebuild", "recompute", "keep"), {}),
    "sharded": ("adamw", 2, "qwen2", ("keep", "save"), {}),
    "rebuilt chains, tied": ("adamw", 2, "llama", ("save", "rebuild", "rebuild", "save"), {}),
    "whole weights": ("adamw", 2, "llama", ("save", "recompute"), {"weights": "replicate"}),
    "experts": ("adamw", 2, "mixtral", ("save", "save"), {}),
    "copies": ("adamw", 4, "llama", ("save", "rebuild"), {"replicas": 2}),
    "8 bits": ("adamw8bit", 2, "llama", ("save",), {}),
}


@pytest.mark.parametrize("case", [c if c == "sharded" else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_in_backward_equals_later_step_bitwise(case: str) -> None:
    name, world, *rest = CASES[case]
    if name != "adamw":
        pytest.importorskip("torchao")
    after = run_ranks(world, _run, name, False, *rest)
    inside = run_ranks(world, _run, name, True, *rest)
    for (expected, some), (got, none) in zip(after, inside, strict=True):
        assert none == 0 < some
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("clips", "clipping needs the norm of all gradients .* or use in_backward=False"),
        ("accumulates", "accumulation needs .* use one micro-batch a step, or use in_backward=False"),
        ("skips_bad_steps", "a bad step cannot be skipped .* or use in_backward=False"),
    ],
)
def test_in_backward_needing_all_gradients_is_refused(given: str, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        build_optimizer(matrix("adamw"), lr=1e-3, in_backward=True, **{given: True})
    build_optimizer(matrix("adamw"), lr=1e-3, **{given: True})


def _twice(world: int, steps_between: bool) -> None:
    mesh = init_mesh(sp=world)
    model = parallelize(small_model("llama", dtype=torch.float32), mesh)
    optimizer = build_optimizer(model, lr=1e-3, in_backward=True)
    for seed in range(2):
        causal_loss(model, small_batch(1, 24, seed=seed), mesh).backward()
        if steps_between:
            optimizer.step()


@pytest.mark.parametrize("world", [1, 2])
def test_in_backward_second_backward_is_refused(world: int) -> None:
    run_ranks(world, _twice, world, True)
    expect_refusal(world, _twice, world, False, error="UnsupportedError", match=r"second gradient of .* optimizer.step")


def _own_wrapper() -> None:
    mesh = init_mesh(sp=2)
    model = parallelize(small_model("llama", dtype=torch.float32), mesh, weights="none")
    build_optimizer(model, lr=1e-3, in_backward=True)


def test_in_backward_under_callers_wrapper_is_refused() -> None:
    expect_refusal(2, _own_wrapper, error="UnsupportedError", match="your own wrapper, .* use weights='shard'")


def _on_an_older_torch() -> None:
    model = nn.Sequential(matrix("adamw"))
    place_weights(model, list(model), WeightOptions(init_mesh(sp=2)))
    with (
        patch("ithaca.state.optimizer.build._is_on_host", lambda parameter: True),
        patch.object(torch, "__version__", type(torch.__version__)("2.11.0")),
    ):
        build_optimizer(model, lr=1e-3, in_backward=True)


def test_in_backward_on_host_old_torch_is_refused() -> None:
    expect_refusal(2, _on_an_older_torch, error="UnsupportedError", match="on the host: torch 2.11.0 .* 2.13 or newer")
