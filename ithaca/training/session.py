"""A stage, built and ready to step: model, optimizer, rows, and every tensor that a checkpoint must hold.

A stage always starts from files: the model that the run starts from, or a checkpoint. So the next stage, a resumed run
and a run at another degree are one and the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.config.schema import RunSettings, StageSettings
from ithaca.data.prepared import Prepared
from ithaca.data.rows.feed import Feed, open_feed
from ithaca.mesh import Mesh, init_mesh
from ithaca.models.files.pretrained import add_adapters, empty_model, read_config
from ithaca.models.files.read_weights import init_weights, load_weights
from ithaca.models.planner.loaded_sizes import sizes_of
from ithaca.models.planner.plan_in_force import AutoMemory, planner_of
from ithaca.models.support import base_model
from ithaca.parallelize import parallelize
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.advice import Words, typed_free
from ithaca.state.checkpoint.state_tensors import state_tensors
from ithaca.state.optimizer.build import build_optimizer
from ithaca.training.degrees import choose_sp
from ithaca.training.schedule import apply_stages


@dataclass(eq=False, slots=True)
class Session:
    """One stage of a run on this rank."""

    number: int
    stage: StageSettings
    mesh: Mesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    feed: Feed
    held_out: Feed | None
    tensors: dict[str, Tensor]
    sizes: ModelSizes

    @property
    def epochs(self) -> float | None:
        """How often the stage takes every row; None where a stream's end is not known before it is reached."""
        known = self.feed.rows_per_epoch
        return None if known is None else self.stage.count * self.stage.batch / known

    def rows_of(self, step: int) -> list[int]:
        """The rows that this rank's sequence group takes in step `step` of the stage."""
        first = step * self.stage.batch
        return [row for row in range(first, first + self.stage.batch) if row % self.mesh.dp == self.mesh.dp_rank]


def precision_of(run: RunSettings, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """What weights are kept in, and what they are cast to for computing (None: themselves).

    Adapters over weights in bf16 are kept in fp32, by PEFT; computing in that too, they would want every input twice.
    """
    name = run.precision
    if name == "auto":
        mixed = device.type == "cuda" and run.optimizer.name != "bf16_sr"
        name = "mixed" if mixed else "bf16" if run.optimizer.name == "bf16_sr" else "fp32"
    weights = torch.bfloat16 if name == "bf16" else torch.float32
    casts = name == "mixed" or (name == "bf16" and run.lora is not None)
    return weights, torch.bfloat16 if casts else None


def stage_config(run: RunSettings, source: str, number: int) -> Any:
    """The model's config in stage `number`: its positions as the stages up to it leave them."""
    config = read_config(source, run.model.config)
    random = run.model.weights == "random" or run.model.name == "embedded"
    return apply_stages(config, run.stages[: number + 1], random=random)


def build_session(
    run: RunSettings, number: int, source: str, prepared: Prepared, feed_state: dict[str, Any] | None, mesh: Mesh | None
) -> Session:
    """The stage with weights as the run starts from; a checkpoint is loaded over them. `mesh`: the last stage's."""
    stage = run.stages[number]
    config = stage_config(run, source, number)
    mesh = _mesh_for(run, number, config, mesh)
    weights, compute = precision_of(run, mesh.device)
    model = empty_model(config, dtype=weights)
    if run.lora is not None:
        model = add_adapters(model, run.lora, seed=run.seed)
    model = parallelize(
        model,
        mesh,
        replicas=run.mesh.replicas,
        on_host=run.memory.on_host,
        kernel=run.model.kernel,
        memory=run.memory.decided if run.memory.plan == "auto" else None,
        memory_budget=run.memory.budget,
        host_budget=run.memory.host_budget,
        optimizer=run.optimizer.name,
        compute_dtype=compute,
    )
    planner = planner_of(model)
    if planner is not None:
        planner.words = _settings(run, number, mesh)
        _refuse_too_long(run, number, mesh, config, planner)
    if run.model.weights == "random":
        init_weights(model, seed=run.seed)
    else:
        load_weights(model, Path(source))
    optimizer = _optimizer(run, model)
    opened = partial(open_feed, prepared, length=stage.length, rows=run.data.rows, seed=run.seed + number)
    feed = opened(split="train", state=feed_state)
    held_out = opened(split="validation") if prepared.has_validation else None
    return Session(
        number,
        stage,
        mesh,
        model,
        optimizer,
        feed,
        held_out,
        state_tensors(model, optimizer),
        sizes_of(model, base_model(model)),
    )


def _refuse_too_long(run: RunSettings, number: int, mesh: Mesh, config: Any, planner: AutoMemory) -> None:
    """A stage that will not fit is told before the stages ahead of it are paid for."""
    for at in range(number, len(run.stages)):
        stage, sp = run.stages[at], choose_sp(run, at, mesh.world, config.get_text_config())
        dp = mesh.world // sp
        planner.check_fits(stage.length, sp=sp, dp=dp, accumulate=stage.batch > dp, words=_settings(run, at, mesh))


def _settings(run: RunSettings, number: int, mesh: Mesh) -> Words:
    """What would fit, as it is typed after `ithaca train run.yaml`."""
    own = f"stages.{number}.sp" if run.stages[number].sp else "mesh.sp"

    def degree(sp: int) -> str:
        return f"{own}={sp}" if sp <= mesh.world else f"launch.processes={sp} {own}={sp}"

    return Words(
        "memory.on_host=everything",
        "memory.host_budget={}GiB".format,
        degree,
        lambda length: f"stages.{number}.length={length}",
        "memory.budget={}".format,
        free=typed_free,
    )


def _mesh_for(run: RunSettings, number: int, config: Any, mesh: Mesh | None) -> Mesh:
    device = None if run.launch.device == "auto" else run.launch.device
    world = mesh.world if mesh is not None else init_mesh(device=device).world
    sp = choose_sp(run, number, world, config.get_text_config())
    if mesh is not None and mesh.sp == sp:
        return mesh
    return init_mesh(sp=sp, device=device)


def _optimizer(run: RunSettings, model: nn.Module) -> torch.optim.Optimizer:
    settings = run.optimizer
    return build_optimizer(
        model,
        settings.name,
        lr=run.stages[0].lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        seed=run.seed,
        in_backward=settings.in_backward,
        clips=settings.clip > 0,
        skips_bad_steps=not settings.in_backward,
    )
