"""Optimizers: what they are built from, and that each trains and weighs what the plan says.

torchao compiles its step for every shape of weight, which takes seconds each on a CPU: but for one slow test it runs
uncompiled here, the same functions line by line.
"""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ithaca.errors import UnsupportedError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.planning.plan import Job
from ithaca.planning.terms.memory_terms import optimizer_bytes
from ithaca.state.optimizer.build import NAMES, build_optimizer
from ithaca.state.weights.placement import WeightOptions, place_weights
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import run_ranks

LOW_BIT = [name for name in NAMES if name != "adamw"]
DTYPE = {"adamw": torch.float32, "adamw8bit": torch.float32, "bf16_sr": torch.bfloat16}
# Wide enough that most of a model has its moments in 8 bits, on two ranks too.
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 128}
SETTINGS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _torchao(request: pytest.FixtureRequest) -> None:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name in LOW_BIT:
        pytest.importorskip("torchao")


@contextmanager
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def matrix(name: str, size: int = 64) -> nn.Module:
    return nn.Linear(size, size, bias=False).to(DTYPE[name])


# What it is built from.


def test_groups_vectors_and_biases_have_no_decay() -> None:
    """gpt_oss: its experts' biases are matrices, its sinks vectors."""
    model = small_model("gpt_oss", dtype=torch.float32)
    model.model.embed_tokens.weight.requires_grad_(False)
    names = {p: name for name, p in model.named_parameters()}
    decayed, plain = build_optimizer(model, **SETTINGS).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {names[p].split(".")[-1] for p in decayed["params"]} == {"weight", "gate_up_proj", "down_proj"}
    assert all(names[p].endswith(("bias", "sinks")) or "norm" in names[p] for p in plain["params"])
    assert any(p.ndim == 2 for p in plain["params"])
    trained = sum(p.requires_grad for p in model.parameters())
    assert len(decayed["params"]) + len(plain["params"]) == trained < len(names)


def test_groups_norms_by_head_have_no_decay() -> None:
    model = small_model("cohere", use_qk_norm=True)
    names = {p: key for key, p in model.named_parameters()}
    matrices = [key for p, key in names.items() if "norm" in key and p.ndim > 1]
    decayed, _ = build_optimizer(model, **SETTINGS).param_groups
    assert matrices
    assert not [names[p] for p in decayed["params"] if "norm" in names[p]]


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_settings_are_passed_on(name: str) -> None:
    optimizer = build_optimizer(matrix(name), name, lr=0.5, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.25)
    [group] = optimizer.param_groups
    assert (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.9), 1e-5, 0.25)
    assert name != "adamw" or group["fused"]


@pytest.mark.parametrize(
    ("name", "dtype", "betas", "match"),
    [
        ("sgd", torch.float32, (0.9, 0.95), "optimizer 'sgd': choose one of adamw, adamw8bit, bf16_sr"),
        ("none", torch.float32, (0.9, 0.95), "nothing to build; use adamw, adamw8bit or bf16_sr"),
        ("bf16_sr", torch.float32, (0.9, 0.95), "'bf16_sr' with weight in torch.float32: load it in bfloat16, or use 'adamw'"),
        ("adamw8bit", torch.float64, (0.9, 0.95), "'adamw8bit' with weight in torch.float64: load it in float32, bfloat16 or"),
        ("bf16_sr", torch.bfloat16, (0.9, 0.999), r"would never fall again: use betas of at most 0.996, \(0.9, 0.95\)"),
    ],
)  # fmt: skip
def test_optimizer_wrong_choices_are_refused(
    name: str, dtype: torch.dtype, betas: tuple[float, float], match: str
) -> None:
    with pytest.raises(UnsupportedError, match=match):
        build_optimizer(nn.Linear(4, 4).to(dtype), name, lr=1e-3, betas=betas)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": None}, "lr=None: a number of at least 0 is needed, such as lr=1e-5"),
        ({"lr": "1e-3"}, "lr='1e-3': a number of at least 0 is needed, such as lr=1e-5"),
        ({"lr": float("nan")}, "lr=nan: a number of at least 0 is needed, such as lr=1e-5"),
        ({"weight_decay": "a"}, "weight_decay='a': a number of at least 0 is needed, such as weight_decay=1e-5"),
        ({"eps": -1e-8}, "eps=-1e-08: a number of at least 0 is needed, such as eps=1e-5"),
        ({"betas": 0.9}, "betas=0.9: two numbers of at least 0 and below 1 are needed, such as (0.9, 0.95)"),
        (
            {"betas": (0.9, 1.0)},
            "betas=(0.9, 1.0): two numbers of at least 0 and below 1 are needed, such as (0.9, 0.95)",
        ),
        ({"model": iter([])}, "build_optimizer was given a list_iterator: pass the model itself"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else given,
)
def test_optimizer_settings_of_other_types_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        build_optimizer(**{"model": nn.Linear(4, 4), "lr": 1e-3, **change})
    assert str(raised.value) == said


def test_optimizer_without_trained_weights_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no parameter of the model wants a gradient"):
        build_optimizer(nn.Linear(4, 4).requires_grad_(False), lr=1e-3)


@pytest.mark.parametrize("name", LOW_BIT)
def test_optimizer_without_torchao_is_refused(name: str) -> None:
    with (
        patch.dict(sys.modules, {"torchao.optim": None}),
        pytest.raises(UnsupportedError, match=rf"{name}.* pip install 'ithaca\[torchao\]', or use 'adamw'"),
    ):
        build_optimizer(matrix(name), name, lr=1e-3)  # type: ignore[arg-type]


# That it trains.


def _losses(name: str, steps: int, settings: dict[str, Any], options: dict[str, Any]) -> list[float]:
    mesh = init_mesh(sp=dist.get_world_size())
    model = parallelize(_wide(name), mesh, optimizer=name, **options)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, name, **settings)  # type: ignore[arg-type]
    losses = []
    with uncompiled():
        for _ in range(steps):
            loss = causal_loss(model, small_batch(2, 24), mesh)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def _wide(name: str) -> PreTrainedModel:
    return small_model("llama", dtype=DTYPE[name], num_hidden_layers=1, **WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_optimizer_steps_reduce_loss(name: str, world: int) -> None:
    for losses in run_ranks(world, _losses, name, 20, SETTINGS, {}):
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] < losses[0] - 1, losses
        assert losses[-1] < min(losses[:10]), losses


def _state_bytes(name: str) -> tuple[float, float]:
    """Bytes of state a parameter, of the real tensors on this rank and by the plan."""
    mesh = init_mesh(sp=dist.get_world_size())
    model = nn.Sequential(matrix(name, 512))
    place_weights(model, list(model), WeightOptions(mesh))
    optimizer = build_optimizer(model, name, lr=1e-3)  # type: ignore[arg-type]
    with uncompiled():
        model(torch.ones(1, 512, dtype=DTYPE[name])).sum().backward()
        optimizer.step()
    [state] = optimizer.state.values()
    held = sum(_bytes(x) for key, x in state.items() if key != "step")
    width = DTYPE[name].itemsize
    job = Job(1, weight_bytes=width, gradient_bytes=width, optimizer=name)  # type: ignore[arg-type]
    return held / (512 * 512 / mesh.world), optimizer_bytes(job)


def _bytes(tensor: Tensor) -> int:
    inner = local(tensor)
    parts = [getattr(inner, name) for name in getattr(inner, "tensor_attrs", ())] or [inner]
    return sum(part.numel() * part.element_size() for part in parts)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_optimizer_state_bytes_equal_plan(name: str, world: int) -> None:
    """Compare bytes to 1%: each quantized tensor has a table of 1 KiB in addition."""
    for held, planned in run_ranks(world, _state_bytes, name):
        assert held == pytest.approx(planned, rel=0.01)


def _ones(name: str, steps: int, options: dict[str, Any], seed: int = 0) -> tuple[Tensor, bool]:
    """A matrix of ones under a gradient of ones and a tiny learning rate; whether other random numbers were touched."""
    mesh = init_mesh(sp=dist.get_world_size())
    model = nn.Sequential(matrix(name).bfloat16())
    nn.init.ones_(model[0].weight)
    place_weights(model, list(model), WeightOptions(mesh, **options))
    torch.manual_seed(mesh.rank)
    optimizer = build_optimizer(model, name, lr=1e-5, seed=seed)  # type: ignore[arg-type]
    before = torch.get_rng_state()
    with uncompiled():
        for _ in range(steps):
            (model(torch.ones(1, 64, dtype=torch.bfloat16)).sum() / mesh.world).backward()
            optimizer.step()
            optimizer.zero_grad()
    return local(model[0].weight).detach().clone(), torch.equal(before, torch.get_rng_state())


def test_stochastic_rounding_moves_small_updates() -> None:
    """100 steps of 1e-5 from 1, where bf16 has 0.996 next: 1e-3 on average, +- 3e-5 over 4096 weights."""
    pytest.importorskip("torchao")
    [(stuck, _)] = run_ranks(1, _ones, "adamw", 100, {})
    assert torch.equal(stuck, torch.ones_like(stuck))
    [(moved, untouched)] = run_ranks(1, _ones, "bf16_sr", 100, {})
    assert abs(float(moved.double().mean()) - (1 - 1e-3)) < 1.5e-4
    assert untouched, "dropout would draw other numbers"
    [(again, _)] = run_ranks(1, _ones, "bf16_sr", 100, {})
    assert torch.equal(moved, again)
    [(other, _)] = run_ranks(1, _ones, "bf16_sr", 100, {}, seed=1)
    assert not torch.equal(moved, other)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"weights": "replicate"}, {"replicas": 2}], ids=str)
def test_stochastic_rounding_keeps_copies_equal(options: dict[str, Any]) -> None:
    """Each rank has another state of torch's own random numbers, as real ranks do."""
    pytest.importorskip("torchao")
    weights = [weight for weight, _ in run_ranks(4, _ones, "bf16_sr", 30, options)]
    assert all(bool((weight != 1).any()) for weight in weights)
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[3])
    # Neighbours have other shards with "replicas", and then other numbers; whole weights with "replicate".
    assert torch.equal(weights[0], weights[1]) == ("weights" in options)


def _few_rows(name: str) -> list[float]:
    """Three rows over four ranks: one rank holds none of them."""
    model = nn.Sequential(nn.Linear(64, 3).to(DTYPE[name]))
    place_weights(model, list(model), WeightOptions(init_mesh(sp=4)))
    optimizer = build_optimizer(model, name, lr=1e-2)  # type: ignore[arg-type]
    losses = []
    with uncompiled():
        for _ in range(5):
            loss = model(torch.ones(1, 64, dtype=DTYPE[name])).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_on_rank_without_rows_steps(name: str) -> None:
    for losses in run_ranks(4, _few_rows, name):
        assert losses[-1] < losses[0]


def _adapters(name: str, in_backward: bool) -> tuple[int, int, bool]:
    """Return the numbers of moved tensors and of tensors with state, and True if a frozen one moved."""
    from peft import LoraConfig, get_peft_model

    mesh = init_mesh(sp=2)
    model: Any = get_peft_model(_wide(name), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model = parallelize(model.to(DTYPE[name]), mesh)
    before = {key: local(p).detach().clone() for key, p in model.named_parameters()}
    optimizer = build_optimizer(model, name, lr=1e-2, in_backward=in_backward)  # type: ignore[arg-type]
    with uncompiled():
        for _ in range(2):
            causal_loss(model, small_batch(1, 24), mesh).backward()
            optimizer.step()
            optimizer.zero_grad()
    moved = {key for key, p in model.named_parameters() if not torch.equal(local(p), before[key])}
    return len(moved), len(optimizer.state), any("lora" not in key for key in moved)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_optimizer_leaves_frozen_weights(name: str, in_backward: bool) -> None:
    for moved, with_state, frozen_moved in run_ranks(2, _adapters, name, in_backward):
        assert (moved, with_state, frozen_moved) == (4, 4, False)


def _resumed(name: str) -> bool:
    """True if two steps, a state dict, a new optimizer and a third step equal three steps."""
    straight, broken = matrix(name), matrix(name)
    broken.load_state_dict(straight.state_dict())
    finished = _advance(straight, build_optimizer(straight, name, lr=1e-2), 3)  # type: ignore[arg-type]
    first = _advance(broken, build_optimizer(broken, name, lr=1e-2), 2)  # type: ignore[arg-type]
    second = build_optimizer(broken, name, lr=1e-2)  # type: ignore[arg-type]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    _advance(broken, second, 1)
    assert len(finished.state) == 1
    return torch.equal(straight.weight, broken.weight)  # type: ignore[arg-type]


def _advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 64, generator=generator).to(next(model.parameters()).dtype)
    with uncompiled():
        for _ in range(steps):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_loaded_state_dict_continues_equally(name: str) -> None:
    assert run_ranks(1, _resumed, name) == [True]


def _compiled(name: str) -> float:
    """The largest difference a step compiled by torchao makes."""
    weights = []
    for stance in ("default", "force_eager"):
        torch.manual_seed(0)
        model = matrix(name)
        optimizer = build_optimizer(model, name, lr=1e-2)  # type: ignore[arg-type]
        model(torch.ones(1, 64, dtype=DTYPE[name])).sum().backward()
        with torch.compiler.set_stance(stance):
            optimizer.step()
        weights.append(local(model.weight).double())  # type: ignore[arg-type]
    return float((weights[0] - weights[1]).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "allowed"), [("adamw8bit", 1e-6), ("bf16_sr", 2**-10)])
def test_optimizer_compiled_step_equals_eager(name: str, allowed: float) -> None:
    """Weights of at most 1/8: random rounding may go to either neighbour, 2^-11 apart."""
    assert max(run_ranks(1, _compiled, name, timeout=250)) <= allowed


def _one_after_the_other(folder: str, leave_cache: bool) -> str:
    """The second rank, whose shard is a row shorter, compiles its step when the first one's code is in the cache."""
    mesh = init_mesh(sp=2)
    torch._dynamo.reset()
    model = nn.Linear(256, 61, bias=False)
    place_weights(model, [], WeightOptions(mesh))
    optimizer = build_optimizer(model, "adamw8bit", lr=1e-3)
    model.weight.grad = torch.zeros_like(model.weight)
    if not leave_cache:
        optimizer._optimizer_step_pre_hooks.clear()
    said = "stepped"
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        for turn in range(2):
            if mesh.rank == turn:
                try:
                    optimizer.step()
                except AssertionError as error:
                    said = str(error).splitlines()[0]
            dist.barrier()
    torch._dynamo.reset()
    return said


@pytest.mark.slow
def test_eight_bit_shorter_shard_gets_own_code(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    kept, left = str(tmp_path / "kept"), str(tmp_path / "left")
    # Without the precaution torch hands the second rank the first one's code: if that ends, so may this.
    assert "expected size 30==31" in run_ranks(2, _one_after_the_other, kept, False, timeout=300)[1]
    assert run_ranks(2, _one_after_the_other, left, True, timeout=300) == ["stepped", "stepped"]
