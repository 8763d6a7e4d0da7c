"""Label smoothing and z-loss through `causal_loss`: value and gradients of one process, whole logits or tiled."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ithaca.errors import BatchError, UnsupportedError
from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.planning.memory_plan import MemoryPlan
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.parity import gradient_errors
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64


def _step(tiled: bool, smoothing: float, z: float) -> float:
    mesh = init_mesh(sp=2)
    plan = MemoryPlan(("save", "save"), (False, False), mlp_tile=5, loss_tile=4) if tiled else None
    with compute_in_fp64():
        alone = small_model("gemma2")
        batch = small_batch(1, 23)
        logits = alone(input_ids=batch["input_ids"]).logits[0, :-1]
        targets = batch["labels"][0, 1:]
        log_divisors = logits[targets != -100].logsumexp(-1)
        wanted = F.cross_entropy(logits, targets, label_smoothing=smoothing) + z * log_divisors.square().mean()
        wanted.backward()
        model = parallelize(small_model("gemma2"), mesh, memory=plan)
        loss = causal_loss(model, batch, mesh, label_smoothing=smoothing, z_loss=z)
        loss.backward()
    grads = {key: p.grad for key, p in alone.named_parameters() if p.grad is not None}
    return max(abs(loss.item() - wanted.item()), *gradient_errors(model, grads).values())


@pytest.mark.few(3)
@pytest.mark.parametrize(("smoothing", "z"), [(0.1, 0.0), (0.0, 0.01), (0.2, 0.001)])
@pytest.mark.parametrize("tiled", [False, True])
def test_loss_options_equal_one_process(tiled: bool, smoothing: float, z: float) -> None:
    assert max(run_ranks(2, _step, tiled, smoothing, z)) < FP64


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"label_smoothing": 1.5}, "label_smoothing=1.5, z_loss=0.0: use 0 <= label_smoothing < 1 and z_loss >= 0"),
    ({"label_smoothing": "0.1"}, "label_smoothing='0.1', z_loss=0.0: use"),
    ({"label_smoothing": float("nan")}, "label_smoothing=nan, z_loss=0.0: use"),
    ({"z_loss": None}, "label_smoothing=0.0, z_loss=None: use"),
    ({"z_loss": float("nan")}, "label_smoothing=0.0, z_loss=nan: use"),
    ({"count": "28"}, "count='28': pass what ithaca.count_tokens(batches, mesh) gives"),
    ({"count": float("nan")}, "count=nan: pass what"),
    ({"count": True}, "count=True: pass what"),
    ({"count": -1}, "count=-1: pass what"),
    ({"count": [28]}, "count=[28]: pass what"),
    ({"count": 3.5}, "count=3.5: pass what"),
    ({"count": 0}, "count=0 beside 7 targets: pass what"),
]


def _said() -> list[str]:
    mesh = init_mesh(sp=1)
    model, batch = parallelize(small_model("llama"), mesh), small_batch(1, 8)
    messages = []
    for options, _ in WRONG:
        with pytest.raises(BatchError) as raised:
            causal_loss(model, batch, mesh, **options)
        messages.append(str(raised.value))
    whole = causal_loss(model, batch, mesh, count=7)
    assert torch.equal(causal_loss(model, batch, mesh, count=torch.tensor(7)), whole)  # type: ignore[arg-type]
    return messages


def test_bad_loss_options_are_refused() -> None:
    [messages] = run_ranks(1, _said)
    for message, (_, start) in zip(messages, WRONG, strict=True):
        assert message.startswith(start)


def test_loss_options_change_the_loss() -> None:
    """Each of them moves the loss, so that ignoring one would be seen above."""
    logits, targets = torch.randn(5, 7, dtype=torch.float64), torch.arange(5)
    plain = F.cross_entropy(logits, targets)
    assert abs(F.cross_entropy(logits, targets, label_smoothing=0.1) - plain) > 1e3 * FP64


def _changed_in_place(change: str) -> float:
    mesh = init_mesh(sp=1)
    with compute_in_fp64():
        alone, batch = small_model("llama"), small_batch(1, 12)
        model = parallelize(small_model("llama"), mesh)
        losses = {alone: alone(**batch).loss, model: causal_loss(model, batch, mesh)}
        for each, loss in losses.items():
            if change == "divided":
                loss /= 4
            elif change == "in one line":
                loss = loss.div_(4)
            else:
                loss += 0.1 * each.get_input_embeddings().weight.square().sum()
            loss.backward()
    grads = {key: p.grad for key, p in alone.named_parameters() if p.grad is not None}
    return max(gradient_errors(model, grads).values())


@pytest.mark.parametrize("change", ["divided", "in one line", "added to"])
def test_loss_changed_in_place_has_changed_gradient(change: str) -> None:
    assert max(run_ranks(1, _changed_in_place, change)) < FP64


def _second_derivatives() -> None:
    mesh = init_mesh(sp=1)
    model = parallelize(small_model("llama"), mesh)
    causal_loss(model, small_batch(1, 8), mesh).backward(create_graph=True)


def test_second_derivatives_are_refused() -> None:
    expect_refusal(1, _second_derivatives, error="UnsupportedError", match="have no second derivatives")


def _derived(kind: str, loss: torch.Tensor) -> torch.Tensor:
    """Return a scalar computed from a loss as users do."""
    if kind == "in place into a tensor":
        total = torch.zeros((), dtype=loss.dtype)
        total += loss
        total += loss
        return total
    made: dict[str, Any] = {
        "times": lambda: 2 * loss,
        "divided": lambda: loss / 4,
        "sum": lambda: sum([loss, loss]),
        "stacked": lambda: torch.stack([loss, loss]).mean(),
        "split": lambda: loss[None].split(1)[0].sum(),
    }
    scalar: torch.Tensor = made[kind]()
    return scalar


DERIVED = ["times", "divided", "sum", "stacked", "split", "in place into a tensor"]


def _refusals(kind: str, weights: Any) -> list[str]:
    """Return what is said of gradients of chosen weights, and of second derivatives; none may be set."""
    mesh = init_mesh(sp=2)
    model, batch = parallelize(small_model("llama"), mesh, weights=weights), small_batch(1, 12)
    chosen = list(model.parameters())
    calls: list[Any] = [
        lambda loss: loss.backward(inputs=chosen),
        lambda loss: torch.autograd.grad(loss, chosen),
        lambda loss: loss.backward(create_graph=True),
    ]
    said = []
    for call in calls:
        with pytest.raises(UnsupportedError) as raised:
            call(_derived(kind, causal_loss(model, batch, mesh)))
        said.append(str(raised.value))
    assert all(weight.grad is None for weight in chosen)
    _derived(kind, causal_loss(model, batch, mesh)).backward()
    assert all(weight.grad is not None for weight in chosen)
    return said


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", DERIVED)
def test_gradients_of_chosen_weights_of_derived_loss_are_refused(kind: str) -> None:
    for said in run_ranks(2, _refusals, kind, "shard"):
        assert said[0] == said[1]
        assert "find no gradients of sharded weights" in said[0]
        assert "have no second derivatives" in said[2]


def _padding_learned() -> list[str]:
    """Return the warnings for labels that copy the ids, twice; then for labels with -100 at padding."""
    mesh = init_mesh(sp=2)
    model = parallelize(small_model("llama"), mesh)
    ids, mask = small_batch(2, 12)["input_ids"], torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ithaca").addHandler(handler)
    try:
        causal_loss(model, batch | {"labels": ids.masked_fill(mask == 0, -100)}, mesh)
        assert not said
        for _ in range(2):
            causal_loss(model, batch | {"labels": ids.clone()}, mesh)
    finally:
        logging.getLogger("ithaca").removeHandler(handler)
    return said


def test_labels_on_padding_warn_once() -> None:
    first, second = run_ranks(2, _padding_learned)
    assert len(first) == 1
    assert first[0].startswith("4 labels of this batch stand on padding")
    assert second == []
