"""Habits of the plain PyTorch loop around the model object: optimizers, freezing, copying, saving."""

from __future__ import annotations

from typing import Any

import torch

import ithaca
from ithaca.proof.small import small_batch, small_model
from tests.doors.habits import Habit, exact
from tests.doors.loops import loss_of, norm_of

DOOR = "plain loop"


def three_steps(sp: int | None) -> dict[str, Any]:
    """The loop of the README."""
    model = small_model("llama")
    mesh = None if sp is None else ithaca.init_mesh(sp=sp)
    if mesh is not None:
        model = ithaca.parallelize(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(3):
        loss = loss_of(model, small_batch(2, 23, seed=step), mesh)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(norm_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


HABITS: list[Habit] = [
    exact(DOOR, "train three steps", three_steps),
]
