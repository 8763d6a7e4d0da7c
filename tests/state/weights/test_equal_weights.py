"""Ranks that built their model without a common seed train rank 0's, all of it, and are told so once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.state.optimizer.build import build_optimizer
from ithaca.state.weights.equal_weights import make_equal
from ithaca.state.weights.placement import WeightOptions, place_weights
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def listen() -> Said:
    said = Said()
    logging.getLogger("ithaca").addHandler(said)
    return said


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def redrawn(seed: int) -> Any:
    """A model of this seed alone, every weight and a buffer."""
    model = small_model("llama", dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.02)
    model.register_buffer("beside", torch.randn(3) > seed)
    return model


def _placed(options: dict[str, Any], shift: int) -> tuple[list[Tensor], list[Tensor], list[str], float]:
    """Rank 0's weights as built and this rank's as placed, what was said, and the loss after three steps."""
    _clear_sharding_prop_cache()
    mesh, said = init_mesh(sp=2), listen()
    first = redrawn(0)
    model = parallelize(redrawn(shift * mesh.rank), mesh, **options)
    logging.getLogger("ithaca").removeHandler(said)
    placed = [whole(x).detach().clone() for x in (*model.parameters(), *model.buffers())]
    optimizer = build_optimizer(model, lr=1e-3)
    for seed in range(3):
        causal_loss(model, small_batch(1, 12, seed=seed), mesh).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = [whole(p).detach().double().sum() for p in model.parameters()]
    return [*first.parameters(), *first.buffers()], placed, said.messages, float(torch.stack(after).sum())


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "replicate"},
        {"weights": "shard"},
        {"weights": "replicate", "on_host": "everything"},
        pytest.param({"replicas": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_of_different_seeds_train_rank_0s_model(options: dict[str, Any]) -> None:
    world = 4 if "replicas" in options else 2
    results = run_ranks(world, _placed, options, 1)
    for expected, placed, _, after in results:
        assert all(torch.equal(a, b) for a, b in zip(expected, placed, strict=True))
        assert after == results[0][3]
    [message] = results[0][2]
    assert message.startswith("ranks held different weights (model.embed_tokens.weight and ")
    assert "rank 0's were taken on all" in message
    assert not any(said for _, _, said, _ in results[1:])


def test_ranks_of_equal_weights_log_nothing() -> None:
    assert all(not said for _, _, said, _ in run_ranks(2, _placed, {"weights": "replicate"}, 0))


def _one_row() -> tuple[bool, str, bool]:
    """Change one row of a large table; tensors on the meta device are left out."""
    mesh, said = init_mesh(sp=2), listen()
    model = nn.ModuleDict({"table": nn.Embedding(1000, 64), "empty": nn.Linear(8, 8, device="meta")})
    with torch.no_grad():
        model["table"].weight.fill_(1.0)  # type: ignore[arg-type]
        model["table"].weight[777] += mesh.rank  # type: ignore[index]
    make_equal(model, mesh)
    logging.getLogger("ithaca").removeHandler(said)
    return bool((model["table"].weight == 1).all()), "".join(said.messages), model["empty"].weight.is_meta  # type: ignore[return-value]


def test_fingerprint_of_one_new_row_differs() -> None:
    (alike, said, empty), (other, *_) = run_ranks(2, _one_row)
    assert alike
    assert other
    assert empty
    assert said.startswith("ranks held different weights (table.weight): rank 0's")


def _other_shapes() -> None:
    mesh = init_mesh(sp=2)
    place_weights(nn.Linear(4, 4 + mesh.rank), [], WeightOptions(mesh))


def test_ranks_of_different_shapes_are_refused() -> None:
    expect_refusal(2, _other_shapes, error="UnsupportedError", match="build the same model on every rank")
