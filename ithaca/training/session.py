"""`build_session`: one stage, built and ready to step: model, optimizer, rows, and the tensors of a checkpoint.

A stage is always built from files: the model that the run starts from, and a checkpoint loaded over it. So the next
stage, a resumed run and a run at another degree are one and the same operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ithaca.config.schema import ModelSettings, RunSettings, StageSettings
from ithaca.data.prepared import Prepared
from ithaca.data.rows.feed import Feed, open_feed
from ithaca.mesh import Mesh, init_mesh
from ithaca.models.files.pretrained import add_adapters, empty_model, read_config
from ithaca.models.files.read_weights import init_weights, load_weights
from ithaca.models.planner.loaded_sizes import loaded_sizes
from ithaca.models.planner.plan_in_force import planner_of
from ithaca.models.support import ModelParts
from ithaca.parallelize import parallelize
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.search.phrases import RUN_FILE, Phrases
from ithaca.state.checkpoint.state_tensors import state_tensors
from ithaca.state.optimizer.build import build_optimizer
from ithaca.training.degrees import StageDegrees
from ithaca.training.schedule import apply_stages


@dataclass(eq=False, slots=True)
class Session:
    """One stage of a run on this rank. `tensors`: what a checkpoint holds, by name."""

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
        """Number of times that the stage takes every row; None for a stream, whose number of rows is not known."""
        known = self.feed.rows_per_epoch
        return None if known is None else self.stage.count * self.stage.batch / known

    def rows_of(self, step: int) -> list[int]:
        """Return the rows that this rank's sequence group takes in step `step` of the stage."""
        first = step * self.stage.batch
        return [row for row in range(first, first + self.stage.batch) if row % self.mesh.dp == self.mesh.dp_rank]


class Precision(NamedTuple):
    """The dtype of the stored weights, and the dtype that they are cast to in forward and backward (None: no cast)."""

    weights: torch.dtype
    compute: torch.dtype | None


def precision_of(run: RunSettings, device: torch.device) -> Precision:
    """Return the dtypes of a run whose `precision` may be "auto"."""
    name = run.precision
    if name == "auto":
        mixed = device.type == "cuda" and run.optimizer.name != "bf16_sr"
        name = "mixed" if mixed else "bf16" if run.optimizer.name == "bf16_sr" else "fp32"
    # PEFT keeps adapters over bf16 weights in fp32. Without a cast every layer's input would be held in both dtypes.
    casts = name == "mixed" or (name == "bf16" and run.lora is not None)
    return Precision(torch.bfloat16 if name == "bf16" else torch.float32, torch.bfloat16 if casts else None)


def stage_config(model: ModelSettings, stages: Sequence[StageSettings], source: str) -> Any:
    """Return the model's config with the RoPE changes of `stages`, which end with the stage to build."""
    random = model.weights == "random" or model.name == "embedded"
    return apply_stages(read_config(source, model.config), stages, random=random)


def build_session(
    run: RunSettings, number: int, source: str, prepared: Prepared, feed_state: dict[str, Any] | None, mesh: Mesh
) -> Session:
    """Build stage `number` with the weights in `source`, over which a checkpoint may be loaded.

    `mesh`: the last stage's, which is used again if the degree is the same.
    """
    precision = precision_of(run, mesh.device)
    config = stage_config(run.model, run.stages[: number + 1], source)
    degrees = StageDegrees(run.mesh, run.stages, mesh.world, int(config.get_text_config().num_attention_heads))
    stage, sp = run.stages[number], degrees.sp(number)
    if mesh.sp != sp:
        mesh = init_mesh(sp=sp, device=mesh.device.type)
    # Made without memory for weights: each rank reads its own shards into the sharded model.
    model = empty_model(config, dtype=precision.weights)
    if run.lora is not None:
        model = add_adapters(model, run.lora, seed=run.seed)
    chosen = run.optimizer
    model = parallelize(
        model,
        mesh,
        replicas=run.mesh.replicas,
        on_host=run.memory.on_host,
        kernel=run.model.kernel,
        memory=run.memory.decided if run.memory.plan == "auto" else None,
        memory_budget=run.memory.budget,
        host_budget=run.memory.host_budget,
        optimizer=chosen.name,
        compute_dtype=precision.compute,
    )
    _check_fits(model, degrees, number)
    if run.model.weights == "random":
        init_weights(model, seed=run.seed)
    else:
        load_weights(model, Path(source))
    optimizer = build_optimizer(
        model,
        chosen.name,
        lr=run.stages[0].lr,
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        seed=run.seed,
        in_backward=chosen.in_backward,
        clips=chosen.clip > 0,
        skips_bad_steps=not chosen.in_backward,
    )
    opened = partial(open_feed, prepared, length=stage.length, rows=run.data.rows, seed=run.seed + number)
    return Session(
        number,
        stage,
        mesh,
        model,
        optimizer,
        feed=opened(split="train", state=feed_state),
        held_out=opened(split="validation") if prepared.has_validation else None,
        tensors=state_tensors(model, optimizer),
        sizes=loaded_sizes(ModelParts.of(model)),
    )


def _check_fits(model: nn.Module, degrees: StageDegrees, number: int) -> None:
    """Refuse this stage or a later stage that does not fit, before any step is paid for."""
    planner = planner_of(model)
    if planner is None:
        return
    planner.phrases = _typed_settings(degrees, number)
    for later in range(number, len(degrees.stages)):
        stage, sp = degrees.stages[later], degrees.sp(later)
        dp, phrases = degrees.world // sp, _typed_settings(degrees, later)
        planner.check_fits(stage.length, sp=sp, dp=dp, accumulate=stage.batch > dp, phrases=phrases)


def _typed_settings(degrees: StageDegrees, number: int) -> Phrases:
    """Return the settings that make stage `number` fit, as the user types them after `ithaca train run.yaml`."""
    own = f"stages.{number}.sp" if degrees.stages[number].sp else "mesh.sp"

    def degree(sp: int) -> str:
        return f"{own}={sp}" if sp <= degrees.world else f"launch.processes={sp} {own}={sp}"

    return RUN_FILE._replace(sp=degree, length=f"stages.{number}.length={{}}".format)
