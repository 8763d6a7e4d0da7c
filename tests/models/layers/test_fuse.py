"""Compiled norms, activations and rotary embeddings: equal to eager mode, less saved, and removable."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.binding import unbind
from ithaca.models.layers import fuse
from ithaca.models.layers.fuse import FusedNorm, compiled_chain, compiled_once, norms_within
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.verify.small_models.features import small_batch, small_model
from tests.pairs import dealt
from tests.ranks import run_ranks
from tests.tolerances import COMPILED

BATCH = small_batch(2, 24)
MODES = {"keep": ("keep", "keep"), "mixed": ("save", "keep"), "save": ("save", "rebuild")}
# A shard is 12 tokens a row: tiles of 8 leave a tail.
TILE = 8
# Norms inside attention: none, of heads, of heads after a transpose, of all heads at once, of latents.
KINDS = ("llama", "qwen3", "gemma3_text", "olmo2", "deepseek_v3")


def step(kind: str, mode: str, fused: bool, weights: str = "none", seed: int = 0) -> dict[str, Tensor]:
    """Return the loss and every gradient (or this rank's shard) of one step in fp32."""
    mesh = init_mesh(sp=2)
    model = small_model(kind, dtype=torch.float32, seed=seed)
    layers = model.config.get_text_config().num_hidden_layers
    modes = (MODES[mode][0], *[MODES[mode][1]] * (layers - 1))
    plan = MemoryPlan(modes, (False,) * layers, TILE, 16)  # type: ignore[arg-type]
    model = parallelize(model, mesh, memory=plan, fuse=fused, weights=weights)
    loss = causal_loss(model, BATCH, mesh)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | {n: g.to_local() if isinstance(g, DTensor) else g for n, g in grads.items()}


def farthest(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return max(float((got[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-3)) for n in wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), dealt(KINDS, list(MODES)))
def test_compiled_step_equals_eager_step(kind: str, mode: str) -> None:
    expected = run_ranks(2, step, kind, mode, False)
    for got, wanted in zip(run_ranks(2, step, kind, mode, True, timeout=600), expected, strict=True):
        assert farthest(got, wanted) < COMPILED


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_compiled_step_sharded_weights_equals_eager_step(mode: str) -> None:
    """FSDP2 gathers and frees the weights that compiled forward and backward read."""
    expected = run_ranks(2, step, "llama", mode, False, "shard")
    for got, wanted in zip(run_ranks(2, step, "llama", mode, True, "shard", timeout=600), expected, strict=True):
        assert farthest(got, wanted) < COMPILED


def _scaled_step(kind: str, planted: bool) -> dict[str, Tensor]:
    """Return a compiled step with scaled query norms; the planted fault is a compiled norm without its weight."""

    def bare(self: FusedNorm, x: Tensor) -> Tensor:
        # Its value alone is left out: a weight without a gradient would be seen by its name.
        weight = self.norm.weight - self.norm.weight.detach() + 1
        return nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6) * weight

    real = small_model

    # Weights start as ones, which nothing could tell apart.
    def scaled(*args: Any, **kwargs: Any) -> Any:
        model = real(*args, **kwargs)
        for name, p in model.named_parameters():
            if "q_norm" in name:
                p.data.fill_(1.5)
        return model

    with patch(f"{__name__}.small_model", scaled):
        if not planted:
            return step(kind, "keep", True)
        with patch.object(FusedNorm, "__call__", bare):
            return step(kind, "keep", True)


@pytest.mark.slow
def test_compiled_step_planted_missing_norm_weight_is_seen() -> None:
    wanted, planted = (run_ranks(2, _scaled_step, "qwen3", wrong, timeout=600)[0] for wrong in (False, True))
    assert farthest(planted, wanted) > 100 * COMPILED


def steps_of_two_models(shared: bool) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Return a step of each of two models with one config and different weights, and the compilations after each."""
    with compiled_once() if shared else nullcontext():
        done, counts = [], []
        for seed in (0, 1):
            done.append(step("qwen3", "mixed", True, seed=seed))
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return done, counts


@pytest.mark.slow
def test_compiled_once_second_model_compiles_nothing() -> None:
    apart, together = (run_ranks(2, steps_of_two_models, shared, timeout=900) for shared in (False, True))
    for (wanted, own), (got, once) in zip(apart, together, strict=True):
        assert all(farthest(*pair) == 0 for pair in zip(got, wanted, strict=True))
        assert farthest(*wanted) > 1e-2
        assert own[1] > own[0]
        assert once[1] == once[0]


def compiled_until(kind: str, tile: int, rows: int) -> list[int]:
    """Return the number of compilations after a step of each length."""
    # What the compiler learned of lengths from other models.
    torch._dynamo.reset()
    mesh = init_mesh(sp=2)
    model = small_model(kind, dtype=torch.float32)
    layers = model.config.get_text_config().num_hidden_layers
    plan = MemoryPlan(("save", *["keep"] * (layers - 1)), (False,) * layers, tile, tile)  # type: ignore[arg-type]
    model = parallelize(model, mesh, memory=plan, fuse=True)
    counts = []
    for length in (24, 40, 96, 64):
        causal_loss(model, small_batch(rows, length), mesh).backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lengths"), dealt(KINDS, [(8, 1), (64, 1), (64, 2)]), ids=str)
def test_compiled_layers_new_length_compile_nothing(kind: str, lengths: tuple[int, int]) -> None:
    tile, rows = lengths
    for first, *later in run_ranks(2, compiled_until, kind, tile, rows, timeout=900):
        assert set(later) == {first}


def put_and_taken_off(kind: str) -> tuple[set[str], set[str], set[str]]:
    """Return the norms found in the first attention, and those with an own forward before and after unbind."""
    model = small_model(kind, dtype=torch.float32)
    attention: Any = model.model.layers[0].self_attn  # type: ignore[union-attr,index]
    found = set(norms_within(attention))
    parallelize(model, init_mesh(sp=1), fuse=True)
    put = {name for name in found if "forward" in getattr(attention, name).__dict__}
    unbind(model)
    return found, put, {name for name in found if "forward" in getattr(attention, name).__dict__}


@pytest.mark.parametrize(("kind", "names"), [("llama", set()), ("qwen3", {"q_norm", "k_norm"})])
def test_norms_within_attention_are_compiled_and_restored(kind: str, names: set[str]) -> None:
    assert run_ranks(1, put_and_taken_off, kind) == [(names, names, set())]


def kept_bytes(norm: Any, x: Tensor) -> int:
    """Return the bytes that autograd saves in one call, each storage once."""
    found: dict[int, int] = {}

    def note(kept: Tensor) -> Tensor:
        found[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        return kept

    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        norm(x)
    return sum(found.values())


def kept(transposed: bool) -> tuple[float, float, bool]:
    """Return saved bytes over input bytes of a bf16 head norm, eager and compiled, and True if strides are kept."""
    norm: Any = small_model("qwen3", dtype=torch.bfloat16).model.layers[0].self_attn.q_norm  # type: ignore[union-attr,index]
    x = torch.randn(1, 512, 4, norm.weight.numel(), generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.transpose(1, 2) if transposed else x
    x.requires_grad_()
    fused = FusedNorm(norm, compiled_chain([norm]))
    return kept_bytes(norm, x) / x.nbytes, kept_bytes(fused, x) / x.nbytes, fused(x).stride() == x.stride()


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_compiled_norm_saves_only_its_input(transposed: bool) -> None:
    """The compiled norm also saves one fp32 number a row; eager mode saves an fp32 copy and the normed values."""
    [(plain, fused, same)] = run_ranks(1, kept, transposed, timeout=600)
    assert plain > 2.9
    assert fused < 1.3
    assert same


def test_can_fuse_dropout_is_false() -> None:
    assert not fuse.can_fuse([nn.Dropout(0.1)])
