"""Counts of FLOPs against torch's counter, and published speeds against their seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.floor import SHAPES, sizes_of, step_flops
from ithaca.config.schema import LoraSettings
from ithaca.models.files.pretrained import add_adapters
from ithaca.models.planner.loaded_sizes import loaded_sizes
from ithaca.models.support import ModelParts
from ithaca.planning.machine.hardware import find_device
from ithaca.planning.memory_plan import Job
from ithaca.planning.model.flops import ATTENTION_BACKWARD, attention_flops, model_flops, utilisation, visible_pairs
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.verify.small_models.features import small_batch, small_model
from tests.planning.models import B8, LLAMA_8B, K

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
LENGTH = 48


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("length", [1, 7, 16, 33])
def test_visible_pairs_equal_mask(length: int, window: int | None) -> None:
    """The count takes half of the diagonal, so it differs from a mask by at most half a pair a token."""
    place = torch.arange(length)
    apart = place[:, None] - place[None]
    seen = (apart >= 0) & (apart < (window or length))
    assert abs(visible_pairs(length, window) - float(seen.sum())) <= length / 2


def counted(model: Any) -> tuple[int, int]:
    """Return torch's counts for a step: products with weights, and eager attention over the whole square."""
    batch = small_batch(1, LENGTH)
    with FlopCounterMode(display=False) as counter:
        model(**batch, use_cache=False).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    attention = sum(flops for kind, flops in counts.items() if "bmm" in str(kind))
    return sum(counts.values()) - attention, attention


def test_model_flops_whole_model_equals_torch() -> None:
    model = small_model("llama", dtype=torch.float32)
    sizes = ModelSizes.from_config(model.config.to_dict())
    products, attention = counted(model)
    assert model_flops(sizes, {}, LENGTH) == products
    seen = model_flops(sizes, {LENGTH: 1}, LENGTH) - products
    # Half of the square, and scores formed once more backward: 3.5 where eager attention has 3.
    assert seen == pytest.approx(attention / 2 * (1 + ATTENTION_BACKWARD) / 3)


def test_model_flops_adapters_equal_torch() -> None:
    model: Any = add_adapters(small_model("llama", dtype=torch.float32), LoraSettings(rank=4), seed=0)
    sizes = loaded_sizes(ModelParts.of(model))
    text = model.get_base_model().config
    plain = ModelSizes.from_config(text.to_dict()).with_lora(4)
    # Nothing below the first layer is trained: its maps have no gradient of their input to make.
    q, kv = (heads * text.head_dim for heads in (text.num_attention_heads, text.num_key_value_heads))
    first = 2 * LENGTH * (text.hidden_size * (q + 2 * kv) + 3 * 4 * text.hidden_size)
    products, _ = counted(model)
    assert model_flops(plain, {}, LENGTH) == products + first
    # A model at hand has its norms among its weights.
    assert model_flops(sizes, {}, LENGTH) == pytest.approx(products + first, rel=0.01)
    full = model_flops(replace(plain, adapters=0), {}, LENGTH)
    assert 2 / 3 * full < model_flops(plain, {}, LENGTH) < full


def test_model_flops_weight_trained_in_place_adds_its_gradient() -> None:
    part = B8.layers[0].attention
    frozen = model_flops(replace(B8, adapters=1, beside=1), {}, K)
    trained = model_flops(replace(B8, adapters=part, in_place=part), {}, K)
    assert trained - frozen == 2 * part * K
    head = replace(B8, adapters=B8.embedding, beside=B8.embedding, in_place=B8.embedding, trained_head=B8.embedding)
    assert model_flops(head, {}, K) - frozen == 2 * B8.embedding * K


def test_model_flops_documents_and_windows_are_less() -> None:
    linear = model_flops(B8, {}, 64 * K)
    whole, halves = (model_flops(B8, {length: 64 * K // length}, 64 * K) - linear for length in (64 * K, 32 * K))
    assert halves == whole / 2
    windowed = ModelSizes.from_config({**LLAMA_8B, "sliding_window": 16 * K, "model_type": "mistral"})
    near = model_flops(windowed, {64 * K: 1}, 64 * K) - linear
    assert near == pytest.approx(whole * (1 - (48 / 64) ** 2))


@pytest.mark.parametrize("length", [64 * K, 128 * K])
def test_attention_flops_are_shared_by_ranks(length: int) -> None:
    for kind in ({}, {"sliding_window": 4 * K, "model_type": "mistral"}):
        sizes = ModelSizes.from_config({**LLAMA_8B, **kind})
        alone = sum(attention_flops(sizes, layer, Job(length)) for layer in sizes.layers)
        whole = model_flops(sizes, {length: 1}, length) - model_flops(sizes, {}, length)
        assert alone * (1 + ATTENTION_BACKWARD) == pytest.approx(whole)
        shared = sum(attention_flops(sizes, layer, Job(length, sp=8)) for layer in sizes.layers)
        assert shared == pytest.approx(alone / 8)


def cells(name: str) -> list[dict[str, Any]]:
    found = json.loads((RESULTS / f"{name}.json").read_text())["cells"]
    return [cell for cell in found if "model_tflops" in cell and "whole" not in cell]


@pytest.mark.parametrize("cell", [*cells("step"), *cells("longest")])
def test_published_speed_is_count_over_seconds(cell: dict[str, Any]) -> None:
    flops = step_flops(SHAPES[cell["model"]], cell["length"])
    assert cell["model_tflops"] == pytest.approx(flops / cell["seconds"] / 1e12, rel=1e-9)


@pytest.mark.parametrize("name", ["run", "run_on_a_slow_host"])
def test_published_utilisation_is_count_over_seconds(name: str) -> None:
    run = json.loads((RESULTS / "training.json").read_text())[name]
    peak = find_device(run["machine"]["device"]).peak * 1e12
    shape, length = SHAPES[run["model"]], run["length"]
    for step in run["taken"]:
        assert step["utilisation"] == pytest.approx(utilisation(step["flops"], step["seconds"], 1, peak))
    most, least = (model_flops(sizes_of(shape), documents, length) for documents in ({length: 1}, {}))
    flops = [step["flops"] for step in run["taken"]]
    # Most rows are one piece of one document.
    assert max(flops) == pytest.approx(most)
    assert least < min(flops)
