"""The quick search: its prices are those of the plans it stands for, and it finds what trying everything finds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest

from ithaca.constants import GIB
from ithaca.errors import MemoryPlanError
from ithaca.planning.memory_plan import MODES, Job, LayerMode, MemoryPlan
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.bounds import Limits
from ithaca.planning.search.candidates import Bounds, Candidate, keeping, running_again
from ithaca.planning.search.choose import FREE, _fit, choose_plan, head_groups_for, loss_tile_for, mlp_tile_for
from ithaca.planning.terms.cost import copy_cost, recompute_cost, tile_cost
from ithaca.planning.terms.memory_terms import Frame, memory_of
from tests.planning.models import LLAMA_8B, K

EVERYTHING = Bounds(inf, inf)
SIX = ModelSizes.from_config({**LLAMA_8B, "num_hidden_layers": 6})
WINDOWED = ModelSizes.from_config(
    {
        **LLAMA_8B,
        "num_hidden_layers": 7,
        "sliding_window": 1024,
        "layer_types": ["full_attention", *["sliding_attention"] * 6],
    }
)


def all_candidates(frame: Frame, bounds: Bounds = EVERYTHING) -> Iterator[Candidate]:
    yield from keeping(frame, bounds)
    yield from running_again(frame, bounds)


def plan_of(frame: Frame, modes: tuple[LayerMode, ...], away: int = 0) -> MemoryPlan:
    offload = tuple(i < away and mode != "keep" for i, mode in enumerate(modes))
    return MemoryPlan(modes, offload, mlp_tile=frame.mlp_tile, loss_tile=4096)


@pytest.mark.parametrize("sizes", [SIX, WINDOWED], ids=["alike", "windowed"])
@pytest.mark.parametrize("tile", [2048, 128 * K])
def test_prices_are_those_of_the_plan(sizes: ModelSizes, tile: int) -> None:
    job = Job(128 * K, weights="none", optimizer="none")
    frame = Frame(sizes, job, tile, 4096, 1)
    found = list(all_candidates(frame))
    assert len({candidate.modes() for candidate in found}) > 30
    for candidate in found:
        plan = plan_of(frame, candidate.modes())
        assert candidate.cost == recompute_cost(sizes, job, plan)
        assert candidate.saved == sum(frame.saves(i, mode)[0] for i, mode in enumerate(plan.layers))


def test_bounds_leave_out_what_is_outside_and_nothing_else() -> None:
    frame = Frame(SIX, Job(128 * K, weights="none", optimizer="none"), 2048, 4096, 1)
    every = list(all_candidates(frame))
    bounds = Bounds(sorted(c.saved for c in every)[len(every) // 2], sorted(c.cost for c in every)[len(every) // 2])
    inside = {c.modes() for c in every if c.saved <= bounds.room and c.cost < bounds.limit}
    assert inside
    assert {c.modes() for c in all_candidates(frame, bounds)} == inside


@pytest.mark.parametrize("seed", range(40))
def test_what_fits_is_what_the_terms_add_up_to(seed: int) -> None:
    draw = random.Random(seed)
    sizes = draw.choice([SIX, WINDOWED])
    job = Job(draw.choice([8, 100, 256]) * K, sp=draw.choice([1, 4]), accumulate=draw.random() < 0.5)
    modes: list[LayerMode] = ["save"]
    while len(modes) < len(sizes.layers):
        modes.append(draw.choice([mode for mode in MODES if mode != "rebuild" or modes[-1] != "keep"]))
    frame = Frame(sizes, job, draw.choice([2048, job.tokens]), 4096, draw.choice([1, 2]))
    offload = tuple(draw.random() < 0.5 and mode != "keep" for mode in modes)
    memory = frame.memory(modes, offload)
    assert frame.fits(modes, offload, memory.device_bytes)
    assert not frame.fits(modes, offload, memory.device_bytes - 1)
    assert frame.pinned(modes, offload) + frame.host_beside == memory.host_bytes


def exhaustive(sizes: ModelSizes, job: Job, usual: MemoryPlan, device: int, host: int) -> float:
    """The least cost of all candidates in all tiles with every number of layers away."""
    best, tile, tiles = inf, usual.mlp_tile, [job.tokens]
    while tile < job.tokens:
        tiles.append(tile)
        tile *= 4
    for tile in tiles:
        frame = Frame(sizes, job, tile, usual.loss_tile, usual.head_groups)
        for candidate in all_candidates(frame):
            for away in range(len(sizes.layers) + 1):
                plan = replace(plan_of(frame, candidate.modes(), away), loss_tile=usual.loss_tile)
                plan = replace(plan, head_groups=usual.head_groups)
                memory = memory_of(sizes, job, plan)
                if memory.device_bytes <= device and memory.host_bytes <= host:
                    best = min(best, cost_of(sizes, job, plan))
                    break
    return best


def cost_of(sizes: ModelSizes, job: Job, plan: MemoryPlan) -> int:
    return recompute_cost(sizes, job, plan) + tile_cost(sizes, job, plan.mlp_tile) + copy_cost(sizes, job, plan)


@pytest.mark.parametrize(
    ("sizes", "length", "device", "host"),
    [
        (SIX, 64, 30, 0),
        (SIX, 128, 21, 4),
        (SIX, 128, 22, 60),
        (SIX, 8, 10, 2),
        (WINDOWED, 64, 18, 3),
        (WINDOWED, 256, 60, 8),
    ],
)
def test_the_search_finds_the_cheapest(sizes: ModelSizes, length: int, device: int, host: int) -> None:
    job = Job(length * K, weights="none", optimizer="none")
    plan = choose_plan(sizes, job, device * GIB, host * GIB)
    groups = head_groups_for(sizes, job, device * GIB)
    usual = replace(plan, mlp_tile=mlp_tile_for(sizes, job), loss_tile=loss_tile_for(sizes, job), head_groups=groups)
    assert cost_of(sizes, job, plan) == exhaustive(sizes, job, usual, device * GIB, host * GIB)
    with pytest.raises(MemoryPlanError):
        choose_plan(sizes, job, 3 * GIB, host * GIB)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_hopeless_has_no_plan(seed: int) -> None:
    draw = random.Random(seed)
    sizes = draw.choice([SIX, WINDOWED, SIX.with_lora(8)])
    job = Job(draw.choice([1, 64, 256]) * K, sp=draw.choice([1, 8]), dp=2, gradients_on_host=draw.random() < 0.3)
    frame = Frame(sizes, job, 2048, 256, 1)
    plans = [c.modes() for c in all_candidates(frame)]
    device = min(frame.memory(modes, (False,) * len(modes)).device_bytes for modes in plans)
    # Room for nothing but what is on the host anyway.
    host = frame.host_beside
    assert not Limits(frame, device, host).hopeless
    assert Limits(frame, device // 4, host).hopeless
    for share in (0.5, 0.7, 0.9, 0.97, 0.995):
        if Limits(frame, int(share * device), host).hopeless:
            assert not any(frame.fits(modes, (False,) * len(modes), int(share * device)) for modes in plans)


@pytest.mark.parametrize("seed", range(12))
def test_what_the_last_chains_leave_out_does_not_fit(seed: int) -> None:
    """Bounds that are told from the last layers alone, on devices and hosts on which some plans fit and some do not."""
    draw = random.Random(seed)
    sizes = draw.choice([SIX, WINDOWED, SIX.with_lora(8)])
    job = Job(draw.choice([64, 256]) * K, sp=draw.choice([1, 8]), accumulate=draw.random() < 0.5)
    frame = Frame(sizes, job, draw.choice([2048, job.tokens]), 256, 1)
    every = list(all_candidates(frame))
    sums = sorted(frame.memory(c.modes(), (False,) * len(sizes.layers)).device_bytes for c in every)
    for share in (0.0, 0.2, 0.5):
        device, host = sums[int(share * len(sums))], frame.host_beside + draw.choice([0, 1, 3]) * GIB
        limits = Limits(frame, device, host)
        inside = {c.modes() for c in all_candidates(frame, Bounds(limits.saved, inf, limits.saved_at))}
        fitting = {c.modes() for c in every if _fit(frame, c.modes(), device, host, FREE) is not None}
        assert fitting
        assert fitting <= inside
        assert len(inside) < len(every)
