"""Memory modes change nothing but memory: loss and every gradient equal one process's in fp64, in every mode.

Tiles are odd and short of the shard, heads go in groups, anchors travel through the store. The tests also count: how
often attention and token-wise work run, how many collectives a replay costs.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ithaca.attention.local import LocalAttention
from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.memory.replay import SavedCall
from ithaca.mesh import init_mesh
from ithaca.models.binding_state import binding_of
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import LayerMode, MemoryPlan
from ithaca.state.weights.placement import recover
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.parity import compare, gradient_errors
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import LISTED, WITH_EXPERTS, small_batch, small_model
from tests.batches import micro_batches
from tests.pairs import cover, dealt
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

LAYERS = 4
PLANS: dict[str, tuple[LayerMode, ...]] = {
    "keep": ("keep",) * 4,
    "save": ("save",) * 4,
    "recompute": ("recompute",) * 4,
    "every second": ("save", "rebuild", "save", "rebuild"),
    "every fourth": ("save", "rebuild", "rebuild", "rebuild"),
    "mixed": ("keep", "recompute", "rebuild", "save"),
}
KINDS = ["plain", "packed", "left_padded", "learned_at_the_end"]


def plan(name: str, *, groups: int = 2, tile: int = 5) -> MemoryPlan:
    modes = PLANS[name]
    return MemoryPlan(modes, tuple(mode != "keep" for mode in modes), tile, 4, groups)


def _parity(kind: str, degrees: tuple[int, int], name: str, kinds: list[str], settings: dict[str, Any]) -> float:
    mesh = init_mesh(dp=degrees[0], sp=degrees[1])
    batches = micro_batches(degrees[0], 2, kinds, experts=settings.pop("experts", False))
    model = small_model(kind, num_hidden_layers=LAYERS)
    return compare(model, batches, mesh, memory=plan(name, **settings)).worst


@pytest.mark.few(3)
@pytest.mark.parametrize("name", PLANS)
def test_memory_mode_sp2_equals_one_process(name: str) -> None:
    assert max(run_ranks(2, _parity, "llama", (1, 2), name, KINDS, {})) < FP64


def test_kv_heads_shared_by_ranks_equal_one_process() -> None:
    """8/2 heads over 4 ranks: a kv head's gradients come from two ranks and are added, in any precision."""
    assert max(run_ranks(4, _parity, "llama", (1, 4), "save", ["plain", "packed"], {})) < FP64


# Norms after the MLP, windows and softcap, a tuple from the MLP, latent attention, a plain MLP.
TELLING = ("gemma2", "gpt_oss")


@pytest.mark.parametrize(
    "kind",
    [kind if kind in TELLING else pytest.param(kind, marks=pytest.mark.slow) for kind in LISTED if kind != "llama"],
)
def test_architecture_memory_mode_equals_one_process(kind: str) -> None:
    name = "save" if kind in WITH_EXPERTS else "mixed"
    assert max(run_ranks(2, _parity, kind, (1, 2), name, KINDS, {})) < FP64


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_moe", "save"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in dealt(WITH_EXPERTS, ["keep", "recompute", "save"], each=2)
            if case != ("qwen3_moe", "save")
        ),
    ],
)
def test_router_loss_memory_mode_equals_one_process(kind: str, name: str) -> None:
    unpacked = [each for each in KINDS if each != "packed"]
    assert max(run_ranks(2, _parity, kind, (1, 2), name, unpacked, {"experts": True})) < FP64


TILES = [{"groups": 2, "tile": 5}, {"groups": 1, "tile": 1000}, {"groups": 4, "tile": 1}, {"groups": 3, "tile": 6}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "degrees"), cover(list(PLANS), TILES, [(1, 1), (1, 2), (2, 2), (1, 3), (1, 4)]), ids=str
)
def test_memory_mode_tiles_groups_and_mesh_equals_one_process(
    name: str, settings: dict[str, int], degrees: tuple[int, int]
) -> None:
    ranks = degrees[0] * degrees[1]
    assert max(run_ranks(ranks, _parity, "llama", degrees, name, KINDS, dict(settings))) < FP64


def _lora(name: str) -> float:
    from peft import LoraConfig, get_peft_model

    mesh = init_mesh(sp=2)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(small_model("llama", num_hidden_layers=LAYERS), config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    result = compare(model, micro_batches(1, 2, ["plain", "packed"]), mesh, memory=plan(name))
    assert len(result.gradients) == 6 * LAYERS, "every adapter of every layer, the first among them"
    return result.worst


@pytest.mark.parametrize("name", ["keep", "save", "mixed"])
def test_lora_memory_mode_equals_one_process(name: str) -> None:
    assert max(run_ranks(2, _lora, name)) < FP64


def _counted(name: str) -> dict[str, int]:
    """Attention forwards, collectives by phase, and runs of every layer's MLP, in one step."""
    mesh = init_mesh(sp=2)
    model: Any = small_model("llama", num_hidden_layers=LAYERS)
    counts: Counter[str] = Counter()
    phase = "forward"
    attend, exchange = LocalAttention.attend, dist.all_to_all_single

    def counting_attend(self: LocalAttention, *args: Any) -> Any:
        counts["attention forwards"] += 1
        return attend(self, *args)

    def counting_exchange(*args: Any, **kwargs: Any) -> Any:
        counts[f"{phase} exchanges"] += 1
        return exchange(*args, **kwargs)

    def counting_gate(forward: Callable[..., Any]) -> Callable[..., Any]:
        # Not by a hook: what has one is never left out.
        return lambda *args: (counts.update(["mlp forwards"]), forward(*args))[1]

    for layer in model.model.layers:
        layer.mlp.gate_proj.forward = counting_gate(layer.mlp.gate_proj.forward)
    parallel = parallelize(model, mesh, memory=plan(name, groups=1, tile=1000))
    for layer in parallel.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda *_: counts.update(["token-wise forwards"]))
    counts.clear()
    with (
        patch.object(LocalAttention, "attend", counting_attend),
        patch.object(dist, "all_to_all_single", counting_exchange),
    ):
        loss = causal_loss(parallel, small_batch(1, 24), mesh)
        phase = "backward"
        loss.backward()
    return dict(counts)


@pytest.mark.parametrize(
    ("name", "attention", "tokenwise", "backward"),
    # Over all layers. Token-wise forwards a layer: 1 to keep, 2 to save or recompute, 3 - 1/k to rebuild every k.
    # Backward exchanges a layer: two, and two more where attention is run again.
    [
        ("keep", 4, 4, 8),
        ("save", 4, 8, 8),
        ("recompute", 8, 8, 16),
        ("every second", 4, 10, 8),
        ("every fourth", 4, 11, 8),
    ],
)
def test_memory_mode_runs_layers_as_often_as_promised(name: str, attention: int, tokenwise: int, backward: int) -> None:
    for counts in run_ranks(2, _counted, name):
        assert counts["attention forwards"] == attention
        assert counts["token-wise forwards"] == tokenwise
        assert counts["forward exchanges"] == 2 * LAYERS
        assert counts["backward exchanges"] == backward


def test_replay_of_an_mlp_leaves_its_value_out() -> None:
    """Saved layers run their MLP in forward and once, tile by tile, in backward: not a third time for its value."""
    for counts in run_ranks(2, _counted, "save"):
        assert counts["mlp forwards"] == 2 * LAYERS


@pytest.mark.parametrize(
    ("kind", "size"), [("llama", 2), ("gemma2", 3), ("olmo2", 2), ("glm4", 3), ("cohere2", 1), ("gpt_oss", 2)]
)
def test_units_by_architecture_have_the_norms_that_serve_them(kind: str, size: int) -> None:
    """An MLP with the norms that only serve it; a norm after the MLP is inside the unit, so its value may stay silent."""
    [roles] = run_ranks(1, _roles, kind)
    wide = [role for role in roles if role[1]]
    assert [len(names) for names, _, _ in wide] == [size] * len(wide)
    assert all(silent for _, _, silent in wide)


def _roles(kind: str) -> list[tuple[tuple[str, ...], bool, bool]]:
    from ithaca.models.binding import bind
    from ithaca.models.binding_state import unsharded
    from ithaca.models.discover.trials import roles_of
    from ithaca.models.layers.install import on_trial
    from ithaca.models.support import decoder_layers

    model = small_model(kind)
    binding = bind(model, init_mesh(sp=1))
    with unsharded(model):
        found = roles_of(model, decoder_layers(model), partial(on_trial, binding))
    return [(role.names, role.wide, role.silent) for roles in found for role in roles]


def _from_a_thread() -> float:
    mesh = init_mesh(sp=2)
    model = small_model("llama", num_hidden_layers=LAYERS)
    batches = micro_batches(1, 2, ["plain"])
    with compute_in_fp64():
        expected = reference(copy.deepcopy(model), batches)
        parallel = parallelize(model, mesh, memory=plan("mixed"))
        loss = causal_loss(parallel, batches[0][0], mesh)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    return max(gradient_errors(parallel, expected.gradients).values())


def test_backward_in_another_thread_equals_one_process() -> None:
    assert max(run_ranks(2, _from_a_thread)) < FP64


def _two_graphs_at_once() -> float:
    """Both forwards before the first backward: nothing of one pass may leak into the other."""
    mesh = init_mesh(sp=2)
    model = small_model("llama", num_hidden_layers=LAYERS)
    batches = micro_batches(1, 1, ["plain", "packed"])
    with compute_in_fp64():
        expected = reference(copy.deepcopy(model), batches)
        parallel = parallelize(model, mesh, memory=plan("every second"))
        count = count_tokens(batches[0], mesh)
        for loss in [causal_loss(parallel, batch, mesh, count=count) for batch in batches[0]]:
            loss.backward()
    return max(gradient_errors(parallel, expected.gradients).values())


def test_two_forwards_before_backward_equal_one_process() -> None:
    assert max(run_ranks(2, _two_graphs_at_once)) < FP64


def _dropout() -> tuple[float, float]:
    """A layer with dropout replays the numbers it drew: gradients equal those of keeping everything."""
    mesh = init_mesh(sp=1)
    grads = []
    for name in ("keep", "save"):
        model = small_model("llama", num_hidden_layers=LAYERS)
        for layer in model.model.layers:
            layer.post_attention_layernorm = nn.Sequential(layer.post_attention_layernorm, nn.Dropout(0.3))
        parallel = parallelize(model, mesh, memory=plan(name, tile=1000))
        torch.manual_seed(7)
        causal_loss(parallel, small_batch(1, 24), mesh).backward()
        grads.append([p.grad.clone() for p in parallel.parameters()])
    other = parallelize(small_model("llama", num_hidden_layers=LAYERS), mesh, memory=plan("keep"))
    causal_loss(other, small_batch(1, 24), mesh).backward()
    return (
        max(float((a - b).abs().max()) for a, b in zip(*grads, strict=True)),
        max(float((a - p.grad).abs().max()) for a, p in zip(grads[0], other.parameters(), strict=True)),
    )


def test_replay_of_dropout_draws_the_same_numbers() -> None:
    [(same, without)] = run_ranks(1, _dropout)
    assert same < 1e-6
    assert without > 1e-3, "the dropout must have done something"


def _retained(mode: LayerMode) -> None:
    mesh = init_mesh(sp=1)
    parallel = parallelize(small_model("llama"), mesh, memory=MemoryPlan((mode,) * 2, (False,) * 2, 8, 8))
    loss = causal_loss(parallel, small_batch(1, 12), mesh)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("mode", ["keep", "save"])
def test_backward_twice_is_refused(mode: LayerMode) -> None:
    """Layers that keep everything could go back twice, a loss in tiles cannot."""
    expect_refusal(1, _retained, mode, error="UnsupportedError", match="retain_graph=True needs")


# The first rank's row alone would be kept whole, the second's is run again: they must not choose each for itself.
RAGGED, RAGGED_BUDGET = (512, 1024), 10_700_000


def _ragged() -> tuple[list[str], float]:
    """The plans of two steps in which ranks have rows of unequal lengths, and the worst error of the gradients."""
    mesh, batches = init_mesh(sp=1), [small_batch(1, length, seed=length) for length in RAGGED]
    model = small_model("llama", num_hidden_layers=6, max_position_embeddings=2048)
    with compute_in_fp64():
        expected = reference(copy.deepcopy(model), [[batch] for batch in batches])
        parallel = parallelize(model, mesh, memory="auto", memory_budget=RAGGED_BUDGET)
        installed: Any = binding_of(parallel).memory
        plans = []
        for _ in range(2):
            parallel.zero_grad()
            causal_loss(parallel, batches[mesh.dp_rank], mesh).backward()
            plans.append(installed.planner.plan.summary())
    return plans, max(gradient_errors(parallel, expected.gradients).values())


@pytest.mark.slow
def test_plan_rows_of_unequal_lengths_is_one_on_all_ranks() -> None:
    (plans, off), (others, also_off) = run_ranks(2, _ragged)
    assert len({*plans, *others}) == 1
    assert "rebuild" in plans[0]
    assert max(off, also_off) < FP64


def _checkpointing() -> None:
    mesh = init_mesh(sp=1)
    parallel = parallelize(small_model("llama"), mesh, memory=MemoryPlan(("save",) * 2, (False,) * 2, 8, 8))
    parallel.gradient_checkpointing_enable()
    causal_loss(parallel, small_batch(1, 12), mesh)


def _checkpointing_before(reentrant: bool) -> None:
    model = small_model("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    parallelize(model, init_mesh(sp=1))


def test_gradient_checkpointing_enabled_later_is_refused() -> None:
    expect_refusal(1, _checkpointing, error="UnsupportedError", match="checkpointing_disable")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_enabled_before_is_refused(reentrant: bool) -> None:
    expect_refusal(1, _checkpointing_before, reentrant, error="UnsupportedError", match="checkpointing_disable")


def _rebuilt_experts() -> None:
    plan = MemoryPlan(("save", "rebuild"), (False,) * 2, 8, 8)
    parallelize(small_model("mixtral"), init_mesh(sp=1), memory=plan)


def test_rebuild_of_expert_layers_is_refused() -> None:
    expect_refusal(1, _rebuilt_experts, error="UnsupportedError", match="expert layers: use 'save' or 'recompute'")


def _taken_off() -> float:
    from ithaca.models.binding import unbind

    model = small_model("llama")
    batch = small_batch(1, 16)
    before = model(**batch).loss
    parallelize(model, init_mesh(sp=1), weights="none", memory=MemoryPlan(("save",) * 2, (False,) * 2, 8, 8))
    unbind(model)
    assert all("forward" not in vars(module) for module in model.modules())
    return float((model(**batch).loss - before).abs().detach())


def test_unbind_memory_plan_leaves_nothing() -> None:
    assert run_ranks(1, _taken_off) == [0.0]


def _after_an_exception(name: str) -> tuple[str, float, int]:
    """A step that fails in the middle of backward on every rank; then `recover`, and a step that must be right."""
    mesh = init_mesh(sp=2)
    model = small_model("llama", num_hidden_layers=LAYERS)
    batches = micro_batches(1, 2, ["plain"])
    with compute_in_fp64():
        expected = reference(copy.deepcopy(model), batches)
        parallel = parallelize(model, mesh, memory=plan(name))
        fail = [True]

        def trip(grad: torch.Tensor) -> None:
            if fail[0]:
                raise RuntimeError("planted")

        def plant(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                output.register_hook(trip)

        parallel.model.layers[1].self_attn.o_proj.register_forward_hook(plant)
        message = ""
        try:
            causal_loss(parallel, batches[0][0], mesh).backward()
        except RuntimeError as error:
            message = str(error)
        fail[0] = False
        recover(parallel)
        gc.collect()
        left = sum(type(x) is SavedCall and not x.used for x in gc.get_objects())
        causal_loss(parallel, batches[0][0], mesh).backward()
    return message, max(gradient_errors(parallel, expected.gradients).values()), left


@pytest.mark.parametrize("name", ["save", "every second"])
def test_step_after_a_failed_backward_equals_one_process(name: str) -> None:
    for message, error, left in run_ranks(2, _after_an_exception, name):
        assert message == "planted"
        assert left == 0, "what the failed step had kept is gone"
        assert error < FP64
