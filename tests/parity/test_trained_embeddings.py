"""`inputs_embeds` that need a gradient: soft prompts, a projector in front, noise; every rank has the whole gradient.

The reference is one process over the rows of all data ranks. What made the embeddings stands on every rank alike, so
over data ranks its gradients are the caller's to add up (`weights="none"`: to average), as docs/plain_loop.md says.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.loss.causal import causal_loss, count_tokens
from ithaca.loss.reduce import reduce_mean
from ithaca.mesh import Mesh, init_mesh
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.sequence.batch import shard_batch
from ithaca.verify.fp64 import compute_in_fp64, relative_error
from ithaca.verify.parity import gradient_errors
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

PLANS: dict[str, Any] = {
    "auto": "auto",
    "none": None,
    "save and rebuild": MemoryPlan(("save", "rebuild"), (False, False), 4, 5),
    "recompute": MemoryPlan(("recompute", "recompute"), (False, False), 4, 5),
}


class Front(nn.Module):
    """A soft prompt and a projector: what stands before a model."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.prompt = nn.Parameter(torch.randn(3, hidden, generator=generator, dtype=torch.float64))
        self.project = nn.Parameter(torch.randn(hidden, hidden, generator=generator, dtype=torch.float64) / hidden)

    def batch(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        rows = len(features)
        embeds = torch.cat([self.prompt.expand(rows, -1, -1), features @ self.project], 1)
        return {"inputs_embeds": embeds, "labels": torch.cat([torch.full((rows, 3), -100), labels], 1)}


def _examples(data: int) -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches of a data rank, of lengths that no degree divides."""
    made = []
    for step, length in enumerate((10 + data, 16)):
        labels = small_batch(2, length, seed=10 * data + step)["labels"]
        generator = torch.Generator().manual_seed(100 * data + step)
        made.append((torch.randn(2, length, 32, generator=generator, dtype=torch.float64), labels))
    return made


def _error(degree: int, weights: str, plan: str, frozen: bool) -> float:
    """The worst error of the front's and the model's gradients, and of each rank's noise."""
    mesh = init_mesh(sp=degree)
    truth = small_model("llama").requires_grad_(not frozen)
    model = parallelize(copy.deepcopy(truth), mesh, weights=weights, memory=PLANS[plan])
    plain, own = Front(32), Front(32)
    with compute_in_fp64():
        steps = [plain.batch(*example) for data in range(mesh.dp) for example in _examples(data)]
        number = sum(int((step["labels"][:, 1:] != -100).sum()) for step in steps)
        expected = []
        for step in steps:
            step["inputs_embeds"].retain_grad()
            loss = truth(**step, use_cache=False).loss * int((step["labels"][:, 1:] != -100).sum()) / number
            loss.backward()
            expected.append(step["inputs_embeds"].grad)
        batches = [own.batch(*example) for example in _examples(mesh.dp_rank)]
        count = count_tokens(batches, mesh)
        for batch in batches:
            batch["inputs_embeds"].retain_grad()
            causal_loss(model, batch, mesh, count=count).backward()
    mean = mesh.dp if weights == "none" else 1
    mine = expected[2 * mesh.dp_rank :][:2]
    noise = [relative_error(b["inputs_embeds"].grad / mean, m) for b, m in zip(batches, mine, strict=True)]
    _reduce(own, mesh, averages=weights == "none")
    front = [relative_error(p.grad, q.grad) for p, q in zip(own.parameters(), plain.parameters(), strict=True)]
    if weights == "none" and not frozen:
        _reduce(model, mesh, averages=True)
    gradients = {name: p.grad for name, p in truth.named_parameters() if p.grad is not None}
    return max(*noise, *front, *gradient_errors(model, gradients).values())


def _reduce(module: nn.Module, mesh: Mesh, *, averages: bool) -> None:
    """Add up over data ranks, or average over all ranks as a DDP around the module does."""
    for parameter in module.parameters():
        if parameter.grad is None:
            continue
        dist.all_reduce(parameter.grad, group=mesh.world_group if averages else mesh.data.get_group())
        if averages:
            parameter.grad /= mesh.world


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", ["shard", "replicate", "none"])
def test_embeddings_trained_have_the_gradient_of_one_process(weights: str) -> None:
    assert max(run_ranks(4, _error, 2, weights, "auto", False)) < FP64
    assert max(run_ranks(2, _error, 2, weights, "none", True)) < FP64


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("plan", list(PLANS))
def test_embeddings_trained_memory_mode_equal_one_process(degree: int, plan: str) -> None:
    assert max(run_ranks(degree, _error, degree, "shard", plan, False)) < FP64


def _by_hand() -> float:
    """Noise on embeddings under a loss of the caller's own."""
    mesh = init_mesh(sp=2)
    truth = small_model("llama")
    model = parallelize(copy.deepcopy(truth), mesh)
    [(features, labels), _] = _examples(0)
    plain, noise = (features.clone().requires_grad_() for _ in range(2))
    with compute_in_fp64():
        logits = truth(inputs_embeds=plain, use_cache=False).logits
        logits.square().mean().backward()
        shard = shard_batch({"inputs_embeds": noise, "labels": labels}, mesh)
        sizes = model(**shard.inputs).logits.square().mean(-1) * shard.real
        reduce_mean(model, sizes.sum(), shard.real.sum(), mesh).backward()
    assert plain.grad is not None
    assert noise.grad is not None
    return relative_error(noise.grad, plain.grad)


def test_embeddings_own_loss_have_the_gradient_of_one_process() -> None:
    assert max(run_ranks(2, _by_hand)) < FP64


def _on_one_rank() -> None:
    mesh = init_mesh(sp=2)
    model = parallelize(small_model("llama"), mesh)
    [(features, labels), _] = _examples(0)
    features.requires_grad_(mesh.rank == 1)
    causal_loss(model, {"inputs_embeds": features, "labels": labels}, mesh).backward()


def test_embeddings_trained_on_one_rank_only_are_refused() -> None:
    expect_refusal(
        2, _on_one_rank, error="BatchError", match=r"ranks 0 and 1 .*unlike in embeddings that need a gradient"
    )
