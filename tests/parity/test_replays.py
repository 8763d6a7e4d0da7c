"""What a second run of a layer could get wrong: numbers drawn anew, a cache written twice, weights of another model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.binding_state import binding_of, unsharded
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MODES, LayerMode, MemoryPlan, Weights
from ithaca.sequence.batch import shard_batch
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.parity import gradient_errors
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

BATCH = small_batch(2, 16)
# A dropout that is a call and no module, noise laid onto the input of experts whose loss is wanted, dropouts everywhere.
DRAWING: dict[str, dict[str, Any]] = {
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.1},
    "mixtral": {"router_jitter_noise": 0.001, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.1, "attn_pdrop": 0.0},
}
# Of a central difference over steps of 1e-5, in fp64.
DIFFERENCE = 1e-6


def plan(mode: LayerMode, tile: int) -> MemoryPlan:
    # The first layer always keeps its input.
    return MemoryPlan(("save" if mode == "rebuild" else mode, mode), (False,) * 2, tile, 100)


def drawn(kind: str, memory: MemoryPlan | None, *, training: bool) -> tuple[nn.Module, float]:
    """A model with gradients, its random numbers those of one seed, and its loss."""
    model = small_model(kind, **DRAWING[kind]).train(training)
    with compute_in_fp64():
        model = parallelize(model, init_mesh(sp=1), memory=memory).train()
        loss = seeded_loss(model)
        torch.manual_seed(99)
        loss.backward()
    return model, float(loss)


def seeded_loss(model: nn.Module) -> Tensor:
    torch.manual_seed(7)
    return causal_loss(model, BATCH, init_mesh(sp=1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def _same_as_unplanned(kind: str, mode: LayerMode, training: bool) -> tuple[float, float]:
    whole, loss = drawn(kind, None, training=training)
    planned, same = drawn(kind, plan(mode, 100), training=training)
    return max(gradient_errors(planned, gradients(whole)).values()), abs(loss - same)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "training", [pytest.param(True, marks=pytest.mark.slow), False], ids=["trained", "evaluated before"]
)
@pytest.mark.parametrize(
    # Inputs are not rebuilt through experts.
    ("kind", "mode"),
    [(kind, mode) for kind in DRAWING for mode in MODES if (kind, mode) != ("mixtral", "rebuild")],
)
def test_replay_of_random_layers_equals_no_plan(kind: str, mode: LayerMode, training: bool) -> None:
    [(errors, loss)] = run_ranks(1, _same_as_unplanned, kind, mode, training)
    assert errors < FP64
    assert loss < FP64


def _along_a_line(kind: str, mode: LayerMode) -> tuple[float, float]:
    """The derivative along a direction, by gradients and by a difference; tiles of four tokens each draw their own."""
    model, _ = drawn(kind, plan(mode, 4), training=True)
    generator = torch.Generator().manual_seed(3)
    line = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
    slope = sum(
        float((p.grad * way).sum()) for p, way in zip(model.parameters(), line, strict=True) if p.grad is not None
    )
    losses = []
    for step in (1e-5, -2e-5):
        with torch.no_grad(), compute_in_fp64():
            for p, way in zip(model.parameters(), line, strict=True):
                p.add_(way, alpha=step)
            losses.append(float(seeded_loss(model)))
    return slope, (losses[0] - losses[1]) / 2e-5


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["keep", "save"])
@pytest.mark.parametrize("kind", ["starcoder2", "gpt2"])
def test_replay_of_random_tiles_has_the_slope_of_a_difference(kind: str, mode: LayerMode) -> None:
    [(slope, difference)] = run_ranks(1, _along_a_line, kind, mode)
    assert abs(slope) > 0.1
    assert slope == pytest.approx(difference, rel=DIFFERENCE)


def _planned_again(mode: LayerMode, tiles: tuple[int, int]) -> float:
    """A longer pass before backward has its own plan: other modes and other tiles."""
    then, now = tiles
    whole, _ = drawn("starcoder2", plan(mode, then), training=True)
    model = parallelize(small_model("starcoder2", **DRAWING["starcoder2"]).train(), init_mesh(sp=1), memory="auto")
    memory: Any = binding_of(model).memory
    plans = iter([plan(mode, then), plan("keep" if mode != "keep" else "save", now)])
    with compute_in_fp64(), patch.object(memory.planner, "plan_for", lambda layout: next(plans)):
        loss = seeded_loss(model)
        with torch.no_grad():
            causal_loss(model, small_batch(2, 24), init_mesh(sp=1))
        loss.backward()
    assert [unit.tile for unit in memory.units] == [now] * len(memory.units)
    return max(gradient_errors(model, gradients(whole)).values())


@pytest.mark.parametrize("tiles", [(4, 100), (100, 5)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_replay_planned_anew_keeps_the_tiles_of_its_forward(mode: LayerMode, tiles: tuple[int, int]) -> None:
    assert max(run_ranks(1, _planned_again, mode, tiles)) < FP64


def plain(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model = small_model("llama")
    with compute_in_fp64():
        model(**batch).loss.backward()
    return gradients(model)


def _with_a_cache(mode: LayerMode) -> float:
    """Outside sequence parallelism transformers hands every layer a cache, and says so to nobody."""
    model = parallelize(small_model("llama"), init_mesh(sp=1), memory=plan(mode, 5))
    with unsharded(model), compute_in_fp64():
        model(**BATCH).loss.backward()
    return max(gradient_errors(model, plain(BATCH)).values())


@pytest.mark.parametrize("mode", MODES)
def test_replay_with_a_cache_equals_one_process(mode: LayerMode) -> None:
    assert max(run_ranks(1, _with_a_cache, mode)) < FP64


def _copied(mode: LayerMode) -> tuple[float, bool]:
    mesh = init_mesh(sp=1)
    model = parallelize(small_model("llama"), mesh, memory=plan(mode, 5))
    other = copy.deepcopy(model)
    with compute_in_fp64():
        causal_loss(other, BATCH, mesh).backward()
    return max(gradient_errors(other, plain(BATCH)).values()), bool(gradients(model))


@pytest.mark.parametrize("mode", MODES)
def test_copy_of_a_planned_model_has_gradients_of_its_own(mode: LayerMode) -> None:
    [(errors, spilled)] = run_ranks(1, _copied, mode)
    assert errors < FP64
    assert not spilled


def _some_gradients(way: str) -> None:
    mesh = init_mesh(sp=1)
    model = parallelize(small_model("llama"), mesh, memory=plan("save", 5))
    loss = causal_loss(model, BATCH, mesh)
    if way == "grad":
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    elif way == "inputs":
        loss.backward(inputs=[model.get_input_embeddings().weight])
    else:
        loss.backward(inputs=list(model.model.layers[1].parameters()))


@pytest.mark.parametrize("way", ["grad", "inputs", "inputs of a layer"])
def test_backward_to_some_inputs_is_refused(way: str) -> None:
    expect_refusal(1, _some_gradients, way, error="UnsupportedError", match="call loss.backward\\(\\), or use")


def adapted(**settings: Any) -> Any:
    """A model with two adapters in attention and MLP, the first of them on; both do something."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings)
    model: Any = get_peft_model(small_model("llama"), config)
    model.add_adapter("other", config)
    return model


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        causal_loss(model, small_batch(1, 11), init_mesh(sp=1))


def evaluate_and_train(model: nn.Module) -> None:
    evaluate(model)
    model.train()


def nudge(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3)


def freeze(model: nn.Module) -> None:
    """Autograd would still have their gradients."""
    model.requires_grad_(False)


def choose_other(model: Any) -> None:
    model.set_adapter("other")


def choose_other_and_go_back(model: Any) -> None:
    model.set_adapter("other")
    with torch.no_grad():
        causal_loss(model, BATCH, init_mesh(sp=1))
    model.set_adapter("default")


def _between(memory: MemoryPlan | None, change: Callable[[Any], None] | None, settings: dict[str, Any]) -> Any:
    """Gradients where something is done between forward and backward."""
    with compute_in_fp64():
        model = parallelize(adapted(**settings), init_mesh(sp=1), memory=memory).train()
        loss = seeded_loss(model)
        if change is not None:
            change(model)
        loss.backward()
    return {key: grad.clone() for key, grad in gradients(model).items()}


REPLAYED = [plan("save", 5), plan("rebuild", 5), plan("recompute", 100)]
TILED = [*REPLAYED, plan("keep", 5)]


@pytest.mark.parametrize("memory", TILED, ids=str)
@pytest.mark.parametrize(
    ("change", "settings", "match"),
    [
        (evaluate, {"lora_dropout": 0.2}, "draws random numbers in training, .* go back to the mode of the forward"),
        (nudge, {}, "its weights were changed or frozen since its forward pass: call backward before optimizer.step"),
        (freeze, {}, "its weights were changed or frozen since its forward pass"),
        (choose_other, {}, "has other adapters on than in its forward pass: call backward before others are chosen"),
    ],
)
def test_replay_of_a_changed_model_is_refused(
    memory: MemoryPlan, change: Callable[[Any], None], settings: dict[str, Any], match: str
) -> None:
    expect_refusal(1, _between, memory, change, settings, error="UnsupportedError", match=match)


@pytest.mark.few(5)
@pytest.mark.parametrize("memory", TILED, ids=str)
@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (evaluate_and_train, {"lora_dropout": 0.2}),
        # Nothing is drawn: a second run is the first, trained or evaluated.
        (evaluate, {}),
        (choose_other_and_go_back, {}),
    ],
)
def test_replay_of_a_model_changed_back_is_exact(
    memory: MemoryPlan, change: Callable[[Any], None], settings: dict[str, Any]
) -> None:
    [expected] = run_ranks(1, _between, memory, None, settings)
    [got] = run_ranks(1, _between, memory, change, settings)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def _trained_at_last(memory: MemoryPlan) -> None:
    with compute_in_fp64():
        model = parallelize(adapted(lora_dropout=0.2), init_mesh(sp=1), memory=memory).eval()
        loss = seeded_loss(model)
        model.train()
        loss.backward()


@pytest.mark.parametrize("memory", TILED, ids=str)
def test_replay_dropout_switched_on_later_is_refused(memory: MemoryPlan) -> None:
    expect_refusal(1, _trained_at_last, memory, error="UnsupportedError", match="draws random numbers in training")


def _stepped(mode: LayerMode) -> None:
    """Steps of two micro-batches, both forwards before both backwards, an evaluation between."""
    mesh = init_mesh(sp=2)
    model = parallelize(small_model("llama"), mesh, memory=plan(mode, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for _ in range(2):
        losses = [causal_loss(model, small_batch(1, 16, seed=seed), mesh) for seed in range(2)]
        losses[0].backward()
        with torch.no_grad():
            causal_loss(model, small_batch(1, 11), mesh)
        losses[1].backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["save", "rebuild", "recompute"])
def test_step_after_two_backwards_is_accepted(mode: LayerMode) -> None:
    """FSDP2's own work on the weights it gathers is none either."""
    run_ranks(2, _stepped, mode)


def _changed_between(memory: MemoryPlan | None, weights: Weights) -> None:
    """Both forwards, then a step between the two backwards."""
    mesh = init_mesh(sp=2)
    model = parallelize(small_model("llama"), mesh, memory=memory, weights=weights)
    losses = [causal_loss(model, small_batch(1, 16, seed=seed), mesh) for seed in range(2)]
    losses[0].backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    losses[1].backward()


@pytest.mark.parametrize("weights", ["shard", "replicate"])
@pytest.mark.parametrize("memory", [None, plan("keep", 100), plan("save", 5)], ids=str)
def test_replay_sharded_weights_changed_is_refused(memory: MemoryPlan | None, weights: Weights) -> None:
    match = "weights were changed between a forward pass and its backward"
    expect_refusal(2, _changed_between, memory, weights, error="UnsupportedError", match=match)


def _stepped_in_backward() -> float:
    """Each weight is stepped as its gradient comes; the embeddings are changed, on whose values no gradient depends."""
    mesh, batch = init_mesh(sp=2), small_batch(1, 16)
    plain = small_model("llama")
    model = parallelize(small_model("llama"), mesh)

    def step(weight: torch.nn.Parameter) -> None:
        torch.optim.SGD([weight], lr=0.1).step()
        weight.grad = None

    for own in (plain, model):
        for weight in own.parameters():
            weight.register_post_accumulate_grad_hook(step)
    with compute_in_fp64():
        for _ in range(2):
            loss = causal_loss(model, batch, mesh)
            with torch.no_grad():
                model.model.embed_tokens.weight.mul_(1)
            loss.backward()
            plain(**batch).loss.backward()
    now = dict(model.named_parameters())
    return max(float((now[key].full_tensor() - weight).abs().max()) for key, weight in plain.named_parameters())


def test_step_within_backward_equals_one_process() -> None:
    assert max(run_ranks(2, _stepped_in_backward)) < FP64


def _functional(memory: MemoryPlan) -> None:
    model = parallelize(small_model("llama"), init_mesh(sp=1), memory=memory)
    others = {key: (1.1 * p.detach()).requires_grad_() for key, p in model.named_parameters()}
    inputs = shard_batch(BATCH, init_mesh(sp=1)).inputs
    torch.func.functional_call(model, others, kwargs=inputs).logits.square().mean().backward()


@pytest.mark.parametrize("memory", [*TILED, plan("keep", 100)], ids=str)
def test_replay_after_functional_call_is_refused(memory: MemoryPlan) -> None:
    """The norm after the last layer is run in tiles whatever the mode."""
    expect_refusal(1, _functional, memory, error="UnsupportedError", match="has other weights than in its forward pass")


def _adapted_parameters(mode: LayerMode, kind: str = "mixtral", *others: str) -> float:
    """PEFT takes them out of their module for every run, and counts that as a change."""
    config = LoraConfig(
        r=2, target_modules=[], target_parameters=["mlp.experts.down_proj", *others], init_lora_weights=False
    )
    plain, model = (get_peft_model(small_model(kind), config) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    model = parallelize(model, init_mesh(sp=1), memory=plan(mode, 5))
    with compute_in_fp64():
        plain(**BATCH).loss.backward()
        loss = causal_loss(model, BATCH, init_mesh(sp=1))
        with torch.no_grad():
            causal_loss(model, BATCH, init_mesh(sp=1))
        loss.backward()
    return max(gradient_errors(model, gradients(plain)).values())


@pytest.mark.parametrize("mode", ["keep", "save", "recompute"])
def test_replay_of_adapted_parameters_equals_one_process(mode: LayerMode) -> None:
    assert max(run_ranks(1, _adapted_parameters, mode)) < FP64


def test_replay_of_adapted_parameters_beside_a_norm_equals_one_process() -> None:
    """A trial of the layer trains all of its weights but these."""
    [error] = run_ranks(1, _adapted_parameters, "save", "qwen3_moe", "mlp.experts.gate_up_proj")
    assert error < FP64
