"""Sizes of a loaded model for `memory="auto"`: every exact architecture can be planned."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.models.planner.loaded_sizes import loaded_sizes
from ithaca.models.planner.plan_in_force import planner_of
from ithaca.models.support import ModelParts
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import Job, LayerMode, MemoryPlan
from ithaca.planning.model.architectures import verdicts
from ithaca.planning.model.layer_parameters import InputsNeeded
from ithaca.planning.search.advice import plan_or_refuse
from ithaca.planning.terms.memory_terms import memory_of
from ithaca.rehearse.memory_trace import Trace
from ithaca.verify.small_models.features import LISTED, build, small_model
from ithaca.verify.small_models.types import survey_config
from tests.ranks import run_ranks
from tests.tolerances import TRACED_MEMORY
from tools.survey.static import kinds

# A type that is newer than the survey has no verdict yet.
EXACT = [kind for kind in kinds() if verdicts().get(kind, {}).get("memory") == "exact"]


@pytest.mark.parametrize(
    "kind", [kind if kind in LISTED else pytest.param(kind, marks=pytest.mark.slow) for kind in EXACT]
)
def test_loaded_sizes_every_exact_type_can_be_planned(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(survey_config(kind))
    sizes = loaded_sizes(ModelParts.of(model))
    assert sizes.total == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)
    assert plan_or_refuse(sizes, Job(64, sp=2), 10**9).layers == ("keep",) * len(sizes.layers)


def test_loaded_sizes_frozen_weights_have_no_gradients() -> None:
    model = small_model("llama")
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    sizes = loaded_sizes(ModelParts.of(model))
    assert sizes.trainable == model.model.norm.weight.numel()


def adapted(targets: Any, saves: Sequence[str] = (), **config: Any) -> Any:
    settings = LoraConfig(r=4, target_modules=targets, modules_to_save=list(saves) or None, init_lora_weights=False)
    return get_peft_model(small_model("llama", dtype=torch.float32, **config), settings)


@pytest.mark.parametrize(
    ("targets", "needed"),
    [
        (["q_proj", "v_proj"], InputsNeeded(True, False, False, False)),
        (["o_proj"], InputsNeeded(False, True, False, False)),
        (["up_proj"], InputsNeeded(False, False, True, False)),
        (["k_proj", "down_proj"], InputsNeeded(True, False, False, True)),
        ("all-linear", InputsNeeded()),
    ],
)
def test_loaded_sizes_trained_linears_need_their_input(targets: Any, needed: InputsNeeded) -> None:
    model = adapted(targets)
    assert {layer.inputs_needed for layer in loaded_sizes(ModelParts.of(model)).layers} == {needed}


@pytest.mark.parametrize("saves", [(), ("lm_head",), ("embed_tokens", "lm_head")])
def test_loaded_sizes_adapters_are_counted_once(saves: Sequence[str]) -> None:
    model = adapted(["q_proj"], saves)
    sizes = loaded_sizes(ModelParts.of(model))
    assert sizes.total == sum(p.numel() for p in model.parameters())
    assert sizes.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes.beside == len(saves) * sizes.embedding
    assert sizes.head_trainable == ("lm_head" in saves) * sizes.embedding


def test_loaded_sizes_trained_weights_are_counted_once() -> None:
    model = small_model("llama").requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    assert loaded_sizes(ModelParts.of(model)).total == sum(p.numel() for p in model.parameters())


WIDE = {"hidden_size": 64, "num_hidden_layers": 4}
# Most is taken at the loss, or in the MLP's backward.
AT_THE_LOSS, AT_THE_MLP = (192, 4000), (512, 256)


def _said_and_seen(targets: Any, saves: Sequence[str], mode: LayerMode, width: int, vocabulary: int) -> tuple[int, int]:
    """Return the peak bytes of a step: planned, and traced on the CPU."""
    mesh, plan = init_mesh(sp=1), MemoryPlan((mode,) * 4, (False,) * 4, mlp_tile=512, loss_tile=256)
    model = adapted(targets, saves, **WIDE, intermediate_size=width, vocab_size=vocabulary)
    model = parallelize(model, mesh, memory=plan)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    batch = {"input_ids": torch.arange(512)[None] % vocabulary}

    def held() -> dict[str, list[torch.Tensor]]:
        state = [x for of in optimizer.state.values() for x in of.values()]
        parameters = list(model.parameters())
        return {
            "weights": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": state,
        }

    for _ in range(2):
        optimizer.zero_grad()
        with Trace(held) as trace:
            causal_loss(model, batch, mesh).backward()
            optimizer.step()
    planner: Any = planner_of(model)
    memory = memory_of(planner.sizes, planner.job, plan)
    return sum(term.device_bytes for term in memory.allocated), trace.peak.total


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["keep", "save"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
@pytest.mark.parametrize("saves", [(), ("embed_tokens", "lm_head")])
def test_planned_memory_frozen_weights_equals_traced(targets: Any, saves: Sequence[str], mode: LayerMode) -> None:
    [(said, seen)] = run_ranks(1, _said_and_seen, targets, saves, mode, *AT_THE_LOSS)
    assert said == pytest.approx(seen, rel=TRACED_MEMORY)


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["save", "recompute"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["o_proj"], "all-linear"])
def test_planned_memory_mostly_frozen_replays_equals_traced(targets: Any, mode: LayerMode) -> None:
    [(said, seen)] = run_ranks(1, _said_and_seen, targets, (), mode, *AT_THE_MLP)
    assert said == pytest.approx(seen, rel=TRACED_MEMORY)
