"""Optimizers made before parallelize train the shards, with the state they have; what cannot follow is refused."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.state.optimizer.build import build_optimizer
from ithaca.state.optimizer.existing_optimizers import ExistingOptimizers
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FAULT, FP64


class OfOnesOwn(torch.optim.Optimizer):
    """A subclass with state made at its first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = parameter.grad.square() + 0.5 * state.get("seen", 0)
                parameter.sub_(parameter.grad * group["lr"] / (1 + state["seen"]))


class Foreign:
    """No torch.optim.Optimizer: nobody finds it."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Unequal settings, one parameter in no group."""
    _, *some = list(model.parameters())
    return torch.optim.AdamW([{"params": some[:5], "lr": 1e-3}, {"params": some[5:], "weight_decay": 0.3}], lr=1e-2)


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, amsgrad=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, fused=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), 1e-2),
    "groups": in_groups,
    "own": lambda model: OfOnesOwn(model.parameters()),
    "built": lambda model: build_optimizer(model, "adamw", lr=1e-2),
}


def step(model: nn.Module, loss: Any, optimizer: Any) -> float:
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return float(loss.detach())


def worst_weight(model: nn.Module, plain: nn.Module) -> float:
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    whole = [(p.full_tensor() if isinstance(p, DTensor) else p, q) for p, q in pairs]
    return max(float((p - q).abs().max()) for p, q in whole)


def trained(name: str, stepped: bool, **options: Any) -> float:
    """Return the largest difference of a weight after three steps, some before parallelize. A scheduler halves the rate."""
    mesh, worst = init_mesh(sp=2), []
    plain, model = small_model("llama"), small_model("llama")
    optimizers = [OPTIMIZERS[name](each) for each in (plain, model)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    with compute_in_fp64():
        for at in range(3):
            batch = small_batch(2, 16, seed=at)
            if at == int(stepped):
                parallelize(model, mesh, **options)
            for each, optimizer, scheduler in zip((plain, model), optimizers, schedulers, strict=True):
                alone = each is plain or at < int(stepped)
                step(each, each(**batch).loss if alone else causal_loss(each, batch, mesh), optimizer)
                scheduler.step()
            worst.append(worst_weight(model, plain))
    return max(worst)


QUICK = [("adamw", True), ("sgd", True), ("groups", False), ("own", True)]


@pytest.mark.parametrize(
    ("name", "stepped"),
    [
        pytest.param(name, stepped, marks=[] if (name, stepped) in QUICK else [pytest.mark.slow])
        for name in OPTIMIZERS
        for stepped in (False, True)
    ],
)
def test_existing_optimizer_trains_as_on_one_process(name: str, stepped: bool) -> None:
    assert max(run_ranks(2, trained, name, stepped)) < FP64


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["replicate", "none"])
def test_existing_optimizer_trains_other_placements(weights: str) -> None:
    if weights == "replicate":
        assert max(run_ranks(2, trained, "adamw", True, weights=weights)) < FP64
    else:
        # The caller's wrapper would average: there is none here, so that only the parameters' identity counts.
        assert run_ranks(2, _kept_apart) == [True, True]


def _kept_apart() -> bool:
    model = small_model("llama")
    before = list(model.parameters())
    parallelize(model, init_mesh(sp=2), weights="none")
    return all(p is q for p, q in zip(model.parameters(), before, strict=True))


def _not_followed() -> float:
    with patch.object(ExistingOptimizers, "follow", lambda self, model, handle: None):
        return trained("sgd", False)


def test_existing_optimizer_not_followed_is_detected() -> None:
    assert min(run_ranks(2, _not_followed)) > FAULT


def _several() -> tuple[float, float]:
    """Two optimizers of one model, made before; and one of another model, which stays as it is."""
    mesh = init_mesh(sp=2)
    plain, model, other = (small_model("llama") for _ in range(3))
    pairs = []
    for each in (plain, model):
        head, *rest = reversed(list(each.parameters()))
        pairs.append((torch.optim.SGD([head], 0.2), torch.optim.Adagrad(rest, 0.01)))
    apart = torch.optim.SGD(other.parameters(), 0.1)
    before = [id(p) for p in apart.param_groups[0]["params"]]
    parallelize(model, mesh)
    batch = small_batch(2, 16)
    with compute_in_fp64():
        plain(**batch).loss.backward()
        causal_loss(model, batch, mesh).backward()
    for optimizers in pairs:
        for optimizer in optimizers:
            optimizer.step()
    return worst_weight(model, plain), float([id(p) for p in apart.param_groups[0]["params"]] == before)


def test_existing_optimizers_of_other_models_stay() -> None:
    for worst, same in run_ranks(2, _several):
        assert worst < FP64
        assert same


def _tied() -> float:
    mesh = init_mesh(sp=2)
    plain, model = (small_model("llama", tie_word_embeddings=True) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (plain, model)]
    parallelize(model, mesh)
    with compute_in_fp64():
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            batch = small_batch(2, 16)
            step(each, each(**batch).loss if each is plain else causal_loss(each, batch, mesh), optimizer)
    return worst_weight(model, plain)


def test_existing_optimizer_shared_weight_follows_once() -> None:
    assert max(run_ranks(2, _tied)) < FP64


def foreign(mesh: Any) -> None:
    model = small_model("llama")
    optimizer = Foreign(model)
    parallelize(model, mesh)
    step(model, causal_loss(model, small_batch(2, 16), mesh), optimizer)


def frozen_heap(mesh: Any) -> None:
    """gc.freeze hides what is there from everybody who looks."""
    model = small_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gc.freeze()
    try:
        parallelize(model, mesh)
    finally:
        gc.unfreeze()
    step(model, causal_loss(model, small_batch(2, 16), mesh), optimizer)


def clipped(mesh: Any) -> None:
    model = small_model("llama")
    parameters = list(model.parameters())
    parallelize(model, mesh)
    causal_loss(model, small_batch(2, 16), mesh).backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)


def factored(mesh: Any) -> None:
    model = small_model("llama")
    optimizer = torch.optim.Adafactor(model.parameters())
    step(model, model(**small_batch(2, 16)).loss, optimizer)
    parallelize(model, mesh)


def unequal(mesh: Any) -> None:
    model = small_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step(model, model(**small_batch(2, 16, seed=mesh.rank)).loss, optimizer)
    parallelize(model, mesh)


def with_a_gradient(mesh: Any) -> None:
    model = small_model("llama")
    model(**small_batch(2, 16)).loss.backward()
    parallelize(model, mesh)


def _refused(script: Any) -> None:
    script(init_mesh(sp=2))


REFUSED = [
    (foreign, "parameter from before ithaca.parallelize .* from model.parameters\\(\\) after"),
    (frozen_heap, "make the optimizer, .* after parallelize"),
    (clipped, "take lists of parameters to clip"),
    (factored, "Adafactor has stepped, and its state 'row_var' of .* make the optimizer after"),
    (unequal, "different state of the weights .* step them alike on all ranks"),
    (with_a_gradient, "has a gradient, .* call model.zero_grad\\(\\) before parallelize"),
]


@pytest.mark.parametrize(("script", "match"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_existing_optimizer_uncuttable_state_is_refused(script: Any, match: str) -> None:
    expect_refusal(2, _refused, script, error="UnsupportedError", match=match)


def _rounded() -> bool:
    """bf16 weights rounded at random: the optimizer knows each parameter by its place, which follows too."""
    mesh = init_mesh(sp=1)
    found = []
    for first in (True, False):
        model = small_model("llama", dtype=torch.bfloat16)
        options: Any = {"lr": 1e-2, "betas": (0.9, 0.95)}
        optimizer = build_optimizer(model, "bf16_sr", **options) if first else None
        parallelize(model, mesh, compute_dtype=torch.bfloat16)
        optimizer = optimizer or build_optimizer(model, "bf16_sr", **options)
        step(model, causal_loss(model, small_batch(2, 16), mesh), optimizer)
        found.append([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_existing_optimizer_stochastic_rounding_equals_later_one() -> None:
    assert run_ranks(1, _rounded, timeout=300) == [True]


def _loaded(sp: int | None, name: str) -> dict[str, Any]:
    """Two steps in one process, its model and its optimizer's state then over ranks, and two steps more."""
    plain, model = small_model("llama"), small_model("llama")
    before = OPTIMIZERS[name](plain)
    for seed in range(2):
        plain(**small_batch(1, 16, seed=seed), use_cache=False).loss.backward()
        before.step()
        before.zero_grad()
    model.load_state_dict(plain.state_dict())
    mesh = init_mesh(sp=sp or 2)
    if sp:
        model = parallelize(model, mesh)
    optimizer = OPTIMIZERS[name](model)
    optimizer.load_state_dict(before.state_dict())
    for seed in range(2, 4):
        batch = small_batch(1, 16, seed=seed)
        loss = causal_loss(model, batch, mesh) if sp else model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole: Any = {key: getattr(p, "full_tensor", lambda p=p: p)().detach() for key, p in model.named_parameters()}
    return dict(whole)


def _loaded_error(name: str) -> float:
    with compute_in_fp64():
        mine, theirs = _loaded(2, name), _loaded(None, name)
    return max(float((mine[key] - theirs[key]).norm() / theirs[key].norm()) for key in theirs)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loaded_whole_state_is_cut_and_continues(name: str) -> None:
    assert max(run_ranks(2, _loaded_error, name)) < FP64


def _coded() -> None:
    from torchao.optim import AdamW8bit

    mesh = init_mesh(sp=2)
    model = parallelize(small_model("llama"), mesh)
    optimizer = AdamW8bit(model.parameters())
    causal_loss(model, small_batch(1, 16), mesh).backward()
    optimizer.step()


def test_existing_block_quantized_optimizer_is_refused() -> None:
    pytest.importorskip("torchao")
    expect_refusal(
        2, _coded, error="UnsupportedError", match=r"AdamW8bit codes blocks.*build_optimizer\(model, 'adamw8bit'"
    )
