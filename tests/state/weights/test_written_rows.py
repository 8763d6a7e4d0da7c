"""Writes to rows, columns and other views of split weights, gradients and state: those of one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.loss.causal import causal_loss
from ithaca.mesh import init_mesh
from ithaca.parallelize import parallelize
from ithaca.verify.fp64 import compute_in_fp64
from ithaca.verify.small_models.features import small_batch, small_model
from tests.ranks import expect_refusal, run_ranks
from tests.tolerances import FP64

Write = Callable[[Any], object]


def _set_rows(weight: Tensor) -> None:
    weight[50:] = weight[:50].mean(0, keepdim=True)


def _swap(weight: Tensor) -> None:
    weight[5] = weight[6]
    weight[-1].copy_(weight[0])


def _in_chunks(weight: Tensor) -> None:
    for part in weight.chunk(3):
        part.mul_(0.1)
    weight.split([7, len(weight) - 7])[1].add_(1)
    for at in range(4):
        weight[at].fill_(at)


def _through_views(weight: Tensor) -> None:
    weight[:50][3:9][:, 2:4].mul_(3)
    weight.T[:, 11].zero_()
    weight[20:40, 3] = 7.0
    weight[44].view(2, -1)[1] = 0


def _masked(weight: Tensor) -> None:
    weight[:30].masked_fill_(torch.arange(30)[:, None] % 2 == 0, 0)
    weight[30:40][[3, 5]] = 2.0
    weight[40:50] *= torch.arange(10, dtype=weight.dtype)[:, None]


def _of_many(weight: Tensor) -> None:
    torch._foreach_mul_([weight[:9], weight[30:33]], 0.5)


def _by_columns(weight: Tensor) -> None:
    weight[:, :5].zero_()
    weight.T.mul_(2)


WRITES: dict[str, Write] = {
    "zero_": lambda weight: weight[:50].zero_(),
    "one row": lambda weight: weight.select(0, 7).mul_(0),
    "narrow": lambda weight: weight.narrow(0, 10, 40).sub_(1),
    "rows set": _set_rows,
    "rows copied": _swap,
    "chunks": _in_chunks,
    "views of views": _through_views,
    "masks": _masked,
    "several at once": _of_many,
    "columns": _by_columns,
    "data": lambda weight: weight.data[5].fill_(0.5),
}


def _written(sp: int | None, write: Write, replicas: int) -> dict[str, Tensor]:
    """Gradients, state and weights that were written to, after two steps of an optimizer."""
    model: Any = small_model("llama")
    if sp:
        mesh = init_mesh(sp=sp)
        model = parallelize(model, mesh, replicas=replicas)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    changed = [model.lm_head.weight, model.model.embed_tokens.weight, model.model.layers[0].mlp.up_proj.weight]
    for seed in range(2):
        batch = small_batch(1, 16, seed=seed)
        loss = causal_loss(model, batch, mesh) if sp else model(**batch, use_cache=False).loss
        loss.backward()
        for weight in changed[:2]:
            write(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            write(changed[0])
        write(optimizer.state[changed[1]]["exp_avg"])
    whole: Any = [getattr(w, "full_tensor", lambda w=w: w)().detach() for w in model.parameters()]
    return dict(enumerate(whole))  # type: ignore[arg-type]


def _errors(write: Write, sp: int, replicas: int) -> float:
    with compute_in_fp64():
        mine, theirs = _written(sp, write, replicas), _written(None, write, 1)
    return max(float((mine[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


@pytest.mark.few(4)
@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("name", WRITES)
def test_write_to_rows_changes_the_weight(name: str, world: int, replicas: int) -> None:
    assert max(run_ranks(world, _named_errors, name, world, replicas)) < FP64


def _named_errors(name: str, world: int, replicas: int) -> float:
    return _errors(WRITES[name], world // replicas, replicas)


def _read_rows() -> list[float]:
    model: Any = parallelize(small_model("llama"), init_mesh(sp=2))
    plain: Any = small_model("llama")
    weight, truth = model.lm_head.weight, plain.lm_head.weight
    (weight[3:9] ** 2).sum().backward()
    (truth[3:9] ** 2).sum().backward()
    errors = [weight.grad.full_tensor() - truth.grad]
    with torch.no_grad():
        errors += [(weight[3:9] * 2).full_tensor() - truth[3:9] * 2, weight[4].clone().full_tensor() - truth[4]]
        before = weight.full_tensor()
        copy = weight[3:9].clone()
        copy.zero_()
        errors.append(weight.full_tensor() - before)
    return [float(error.abs().max()) for error in errors]


def test_rows_read_have_gradients() -> None:
    for errors in run_ranks(2, _read_rows):
        assert max(errors) < FP64


def _draws_rows() -> None:
    model: Any = parallelize(small_model("llama"), init_mesh(sp=2))
    with torch.no_grad():
        model.lm_head.weight[50:].normal_()


def test_random_draw_on_rows_is_refused() -> None:
    expect_refusal(2, _draws_rows, error="UnsupportedError", match="normal_ was called on split weights")
