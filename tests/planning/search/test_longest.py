"""The longest row is the longest that is planned, whatever is decided and however much there is; more is never less."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from ithaca.planning.model.known_models import find_model
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.best_mesh import best_options
from ithaca.planning.search.bisection import smallest
from ithaca.planning.search.longest import STEP, fits, fits_any, longest, longest_length, longest_of_all
from ithaca.planning.search.meshes import all_degrees, meshes_of_all, meshes_of_parts
from ithaca.planning.search.request import MeshShape, PlanRequest, Recipe, recipes
from ithaca.planning.terms.traffic import Machine
from tests.planning.machines import machine
from tests.planning.models import B1, B8, LLAMA_8B, K

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen2.5-7b", "gemma-3-4b-it", "gpt-oss-20b", "llama-3.1-70b")


@cache
def sizes_of(name: str) -> ModelSizes:
    known = find_model(name)
    assert known is not None
    return known.sizes


def on(card: str, gpus: int, nodes: int = 1, *, host: int) -> Machine:
    """`host` is GB of a node, however many cards it has."""
    return replace(machine(card, gpus, nodes), host_memory=host * 10**9)


def drawn(seed: int) -> PlanRequest:
    """A job: cards of all sizes, numbers that nothing divides, hosts that are short and ample."""
    draw = random.Random(seed)
    sizes = sizes_of(draw.choice(MODELS))
    host = draw.choice((10, 64, 200, 800, 4000))
    cards = on(draw.choice(("H100", "A100-40GB", "RTX-4090")), draw.randint(1, 9), draw.choice((1, 1, 2, 5)), host=host)
    batch = draw.choice((None, None, None, 1, 4))
    return PlanRequest(sizes if draw.random() < 0.8 else sizes.with_lora(16), cards, batch=batch)


def tried_out(request: PlanRequest) -> int:
    """The longest of every cut of every part of the machine with every recipe."""
    best, on_all = 0, request.machine
    for gpus in range(1, on_all.gpus + 1):
        for nodes in range(1, on_all.nodes + 1):
            part = replace(request, machine=replace(on_all, gpus=gpus, nodes=nodes))
            for degrees in all_degrees(part):
                for recipe in (recipe for group in recipes(part) for recipe in group):
                    best = max(best, longest(part, degrees, recipe, beyond=best))
    return best


@pytest.mark.few(8)
@pytest.mark.parametrize("seed", range(24))
def test_the_longest_is_the_longest_that_is_planned(seed: int) -> None:
    request = drawn(seed)
    best = longest_of_all(request)
    length = best.length if best is not None else 0
    assert length == tried_out(request)
    if best is not None:
        chosen = best_options(request, length)[0]
        # What is said of it is what is planned for it.
        assert chosen.recipe == best.recipe
        assert (chosen.machine.gpus, chosen.machine.nodes) == (
            best.mesh.request.machine.gpus,
            best.mesh.request.machine.nodes,
        )
    longer = length + (STEP if length >= STEP else 1)
    assert not best_options(request, longer)
    assert not fits_any(request, longer)


def test_a_given_length_is_never_longer_than_the_longest() -> None:
    """AdamW over fp32 weights fits as well, but not at this length."""
    request = PlanRequest(sizes_of("llama-3.1-70b"), on("H100", 8, host=2000))
    best = longest_of_all(request)
    exact = longest_of_all(replace(request, optimizer="adamw"))
    assert best is not None
    assert exact is not None
    assert best.recipe.optimizer == "bf16_sr"
    assert exact.recipe.optimizer == "adamw"
    given = 3 * exact.length // 2
    assert best_options(request, given)
    assert best.length >= given


@pytest.mark.parametrize("name", MODELS)
def test_more_host_memory_is_never_shorter(name: str) -> None:
    lengths = [
        longest_length(PlanRequest(sizes_of(name), on("A100-80GB", 4, host=host))) for host in (20, 100, 300, 600, 2000)
    ]
    assert lengths == sorted(lengths)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("host", [100, 2000])
def test_more_gpus_are_never_shorter(name: str, host: int) -> None:
    lengths = [longest_length(PlanRequest(sizes_of(name), on("H100", gpus, host=host))) for gpus in range(1, 12)]
    assert lengths == sorted(lengths)
    lengths = [longest_length(PlanRequest(sizes_of(name), on("H100", 8, nodes, host=host))) for nodes in range(1, 8)]
    assert lengths == sorted(lengths)


def test_gpus_are_left_idle_only_where_all_of_them_do_not_do() -> None:
    # One row over nine ranks needs nine heads.
    rows = PlanRequest(sizes_of("gemma-3-4b-it"), machine(gpus=9), batch=1)
    assert best_options(rows, 32 * K)[0].degrees == MeshShape(1, 1, 8)
    # 40 ranks are more than 32 heads, so that five nodes are five groups; of four nodes one group can be made.
    request = PlanRequest(B8, machine(nodes=5))
    far = longest_length(request)
    assert longest_length(PlanRequest(B8, machine(nodes=4))) == far
    chosen = best_options(request, far)[0]
    assert (chosen.machine.nodes, chosen.degrees) == (4, MeshShape(1, 1, 32))
    near = max(
        longest(request, cut, Recipe("bf16", "bf16_sr", place))
        for cut in all_degrees(request)
        for place in (False, True)
    )
    assert near < far
    assert all(option.machine == request.machine for option in best_options(request, near))
    # A degree that does not divide them is refused, not answered with fewer.
    assert meshes_of_parts(replace(request, sp=3)) == meshes_of_all(replace(request, sp=3)) == []


def test_idle_gpus_leave_their_host_memory_to_the_others() -> None:
    heads = ModelSizes.from_config({**LLAMA_8B, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128})
    request = PlanRequest(heads, on("H100", 8, host=100))
    best = longest_of_all(request)
    assert best is not None
    assert best.mesh.request.machine.gpus == 4
    assert best.mesh.request.host_budget == 2 * request.host_budget


def test_lengths_below_a_step_are_found_too() -> None:
    def with_memory(size: int) -> PlanRequest:
        cards = on("H100", 1, host=1)
        return PlanRequest(B1, replace(cards, device=replace(cards.device, memory=size)))

    least = smallest(1, 2**36, lambda size: fits_any(with_memory(size), 500))
    assert least is not None
    request = with_memory(least)
    assert 500 <= longest_length(request) < STEP
    assert not best_options(request, longest_length(request) + 1)


@pytest.mark.parametrize("on_cards", [machine(), machine("RTX-4090", gpus=2, host=64), machine(gpus=1)], ids=str)
def test_the_longest_fits_and_one_step_more_does_not(on_cards: Machine) -> None:
    request, recipe = PlanRequest(B1, on_cards), Recipe("mixed", "adamw")
    for degrees in all_degrees(request):
        length = longest(request, degrees, recipe)
        assert fits(request, length, degrees, recipe)
        assert not fits(request, length + K, degrees, recipe)
        assert longest(request, degrees, recipe, beyond=length // K // 3 * K) == length
        assert longest(request, degrees, recipe, beyond=length) == 0
