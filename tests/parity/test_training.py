"""Training, not just one gradient: optimizer steps, clipping, adapters, checkpointing, the caller's own DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.parity import compare, gradient_errors
from ithaca.verify.reference import reference
from ithaca.verify.small_models.features import small_model
from tests.batches import Batch, micro_batches
from tests.ranks import run_ranks
from tests.tolerances import FP32_LOSS_AFTER_20_STEPS, FP64

STEPS = 20
CLIP = 0.5


def _schedule(dp: int) -> list[list[list[Batch]]]:
    """For every step and data rank two micro-batches with other lengths and token counts."""
    kinds = [["plain", "left_padded"], ["packed", "learned_at_the_end"], ["right_padded", "plain"]]
    return [
        [
            [{**b, "input_ids": (b["input_ids"] + step) % 60 + 1} for b in own]
            for own in micro_batches(dp, 1, kinds[step % 3])
        ]
        for step in range(STEPS)
    ]


def _train(model: nn.Module, losses_of: Any, schedule: list[Any]) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms = [], []
    for step in schedule:
        total = 0.0
        for loss in losses_of(step):
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def _alone(dp: int) -> tuple[list[float], list[float]]:
    model = small_model("llama", dtype=torch.float32)
    losses, norms = [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in _schedule(dp):
        losses.append(reference(model, step).loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _together(degrees: tuple[int, int]) -> tuple[list[float], list[float]]:
    dp, sp = degrees
    mesh = init_mesh(dp=dp, sp=sp)
    model = parallelize(small_model("llama", dtype=torch.float32), mesh)

    def losses_of(step: list[list[Batch]]) -> Any:
        own = step[mesh.dp_rank]
        count = count_tokens(own, mesh)
        return (causal_loss(model, batch, mesh, count=count) for batch in own)

    return _train(model, losses_of, _schedule(dp))


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [(1, 2), *(pytest.param(degrees, marks=pytest.mark.slow) for degrees in ((2, 2), (1, 4)))],
    ids=str,
)
def test_training_clipped_steps_equal_one_process(degrees: tuple[int, int]) -> None:
    losses, norms = _alone(degrees[0])
    assert all(norm > CLIP for norm in norms[:5]), "clipping must bite for this to mean anything"
    for got, got_norms in run_ranks(degrees[0] * degrees[1], _together, degrees):
        assert max(abs(a - b) for a, b in zip(got, losses, strict=True)) < FP32_LOSS_AFTER_20_STEPS
        assert max(abs(a - b) / b for a, b in zip(got_norms, norms, strict=True)) < 1e-4
    assert losses[-1] < losses[0] - 0.1, "and the model must learn"


def _lora(degrees: tuple[int, int], kind: str) -> float:
    from peft import LoraConfig, get_peft_model

    mesh = init_mesh(dp=degrees[0], sp=degrees[1])
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(small_model(kind), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert any("embed_tokens" in name for name in frozen)
    result = compare(model, micro_batches(degrees[0], 2, ["plain", "packed", "left_padded"]), mesh)
    assert len(result.gradients) == 12, sorted(result.gradients)
    return result.worst


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("degrees", [(1, 2), (2, 2)], ids=str)
def test_lora_frozen_embeddings_equals_one_process(kind: str, degrees: tuple[int, int]) -> None:
    assert max(run_ranks(degrees[0] * degrees[1], _lora, degrees, kind)) < FP64


def _checkpointed(kind: str) -> float:
    mesh = init_mesh(sp=2)
    model = small_model(kind)
    batches = micro_batches(1, 2, ["plain", "packed"])
    with compute_in_fp64():
        expected = reference(copy.deepcopy(model), batches)
        parallel = parallelize(copy.deepcopy(model), mesh, memory=None)
        parallel.gradient_checkpointing_enable()
        count = count_tokens(batches[0], mesh)
        # Both graphs are alive before the first backward: a layout must not leak from one into the other.
        losses = [causal_loss(parallel, batch, mesh, count=count) for batch in batches[0]]
        for loss in losses:
            loss.backward()
    return max(gradient_errors(parallel, expected.gradients).values())


def test_transformers_checkpointing_two_forwards_equals_one_process() -> None:
    assert max(run_ranks(2, _checkpointed, "llama")) < FP64


def _ddp() -> float:
    mesh = init_mesh(dp=2, sp=2)
    model = small_model("llama")
    batches = micro_batches(2, 1, ["plain"])
    with compute_in_fp64():
        expected = reference(copy.deepcopy(model), batches)
        parallel = parallelize(copy.deepcopy(model), mesh, weights="none")
        wrapped = DistributedDataParallel(parallel)
        causal_loss(wrapped, batches[mesh.dp_rank][0], mesh).backward()
    return max(gradient_errors(parallel, expected.gradients).values())


def test_ddp_of_the_caller_equals_one_process() -> None:
    assert max(run_ranks(4, _ddp)) < FP64
