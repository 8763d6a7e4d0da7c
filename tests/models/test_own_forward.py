"""A forward that was replaced on one module before parallelize, as kernel patches do, is trained and kept."""

from __future__ import annotations

from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.binding import unbind
from ithaca.models.layers import fuse
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import LayerMode, MemoryPlan
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.parity import compare
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

NORM, MLP, PRODUCT = "post_attention_layernorm", "mlp", "mlp.up_proj"
TILED, WHOLE = 5, 64


def bent(self: Any, x: Tensor) -> Tensor:
    """Not linear, and other in every layer: a value left out or another layer's weights show."""
    out: Tensor = type(self).forward(self, x)
    return out * (1.5 + out.square().mean(-1, keepdim=True))


def mixed(self: Any, x: Tensor) -> Tensor:
    """A forward that mixes all tokens, so that a tile changes the result."""
    out: Tensor = type(self).forward(self, x)
    return out * (1.5 + out.square().mean())


FORWARDS = {"bent": bent, "mixed": mixed}


def patched(place: str, layers: tuple[int, ...], forward: str = "bent", kind: str = "llama") -> Any:
    model: Any = small_model(kind)
    for index in layers:
        module = model.model.layers[index].get_submodule(place)
        module.forward = MethodType(FORWARDS[forward], module)
    return model


def error(model: Any, mode: LayerMode | None, tile: int, fuse_it: bool) -> float:
    """The worst error of a step; mode None: memory="auto"."""
    memory: Any = "auto" if mode is None else MemoryPlan((mode,) * 2, (False,) * 2, tile, 7)
    # Dynamo fixes a module's attributes in its graph whatever it is compiled with.
    real = torch.compile
    with patch.object(fuse.torch, "compile", lambda function: real(function, backend="eager")):
        return compare(model, [[small_batch(2, 16)]], init_mesh(sp=1), memory=memory, fuse=fuse_it).worst


def patched_error(
    place: str, layers: tuple[int, ...], mode: LayerMode | None, tile: int, fuse_it: bool, forward: str = "bent"
) -> float:
    return error(patched(place, layers, forward), mode, tile, fuse_it)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("mode", "tile"), [(None, TILED), ("keep", TILED), ("keep", WHOLE), ("save", TILED), ("recompute", WHOLE)]
)
@pytest.mark.parametrize("place", [NORM, MLP, PRODUCT])
def test_own_forward_is_trained(place: str, mode: LayerMode | None, tile: int) -> None:
    assert run_ranks(1, patched_error, place, (0, 1), mode, tile, False)[0] < FP64


@pytest.mark.parametrize("index", [0, 1])
def test_own_forward_of_one_layer_is_found(index: int) -> None:
    assert run_ranks(1, patched_error, MLP, (index,), "save", TILED, False, "mixed")[0] < FP64


# In the quick run, each where code that did not know it would be shared with the other layer.
COMPILED_CASES = [
    pytest.param(place, layers, marks=() if (place, layers) in ((MLP, (0,)), (PRODUCT, (1,))) else pytest.mark.slow)
    for place in (NORM, MLP, PRODUCT)
    for layers in ((0,), (1,), (0, 1))
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("place", "layers"), COMPILED_CASES)
def test_own_forward_with_fused_units_is_trained(place: str, layers: tuple[int, ...]) -> None:
    assert run_ranks(1, patched_error, place, layers, "save", TILED, True)[0] < FP64


def taken_off(place: str, kind: str, fuse_it: bool) -> tuple[bool, float]:
    """Return True if unbind leaves exactly the forwards that were there, and the change of the loss."""
    model = patched(place, (0, 1), kind=kind)
    batch = small_batch(2, 16)
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    with compute_in_fp64(), torch.no_grad():
        wanted = float(model(**batch).loss)
        unbind(parallelize(model, init_mesh(sp=1), fuse=fuse_it))
        after = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
        return after == before, abs(float(model(**batch).loss) / wanted - 1)


@pytest.mark.parametrize("fuse_it", [False, True])
@pytest.mark.parametrize(("place", "kind"), [(NORM, "llama"), (MLP, "llama"), ("self_attn.q_norm", "qwen3")])
def test_own_forward_stays_after_unbind(place: str, kind: str, fuse_it: bool) -> None:
    [(same, off)] = run_ranks(1, taken_off, place, kind, fuse_it)
    assert same
    assert off < FP64


TILES = MemoryPlan(("save", "save"), (False, False), TILED, TILED)
LATE = ["model.norm", MLP, NORM, "mlp.act_fn", "mlp.up_proj", "self_attn.o_proj"]


def put_on_later(place: str, memory: Any, sp: int) -> None:
    """A forward that reads other tokens is put on after the first step."""
    mesh = init_mesh(sp=sp)
    model = parallelize(small_model("llama"), mesh, memory=memory)
    causal_loss(model, small_batch(1, 16), mesh).backward()
    path = place if place.startswith("model.") else f"model.layers.1.{place}"
    model.get_submodule(path).forward = lambda x: x - x.mean(1, keepdim=True)
    causal_loss(model, small_batch(1, 16), mesh)


@pytest.mark.few(4)
@pytest.mark.parametrize("memory", ["auto", TILES, None], ids=["auto", "tiled", "none"])
@pytest.mark.parametrize("place", LATE)
def test_forward_put_on_later_over_shards_is_refused(place: str, memory: Any) -> None:
    expect_refusal(
        2, put_on_later, place, memory, 2, error="UnsupportedError", match=f"{place} was given a forward after parallel"
    )


@pytest.mark.parametrize("place", ["mlp.act_fn", "mlp.up_proj"])
def test_forward_put_on_later_inside_tiles_is_refused(place: str) -> None:
    """On one rank the forward would read the tokens of a tile."""
    expect_refusal(
        1, put_on_later, place, TILES, 1, error="UnsupportedError", match=f"{place} was given a forward after parallel"
    )
