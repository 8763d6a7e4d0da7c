"""Sections of the run file for training: `stages`, `mesh`, `memory`, `optimizer`, `checkpoints` and smaller ones.

The text below a field is its documentation: a list of all keys can be made from these texts and the defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ithaca.config.field_types import (
    Bytes,
    Length,
    Number,
    PositiveInt,
    PositiveNumber,
    Section,
    Share,
    ShareBelowOne,
    TokenCount,
    as_list,
)
from ithaca.errors import ConfigError


class RopeSettings(Section):
    """`stages.N.rope`: rotary position embeddings of a stage, for lengths beyond those of pretraining."""

    kind: Literal["theta", "linear", "ntk", "yarn", "llama3"]
    """`theta` sets another base; the other kinds scale positions by `factor`, as transformers names them."""

    theta: PositiveNumber | None = None
    """Base of the frequencies; needed by kind `theta`."""

    factor: Annotated[Number, Field(ge=1)] | None = None
    """Factor by which positions are stretched; needed by every kind but `theta`."""

    original: Length | None = None
    """Length that the model was pretrained at; the config's if left out."""

    low_freq_factor: Number = 1.0
    """Llama 3's scaling: waves longer than original / low_freq_factor are stretched in full."""

    high_freq_factor: Number = 4.0
    """Llama 3's scaling: waves shorter than original / high_freq_factor are left as they are."""

    @model_validator(mode="after")
    def _complete(self) -> RopeSettings:
        if self.kind == "theta" and self.theta is None:
            raise ValueError("rope of kind 'theta' needs theta, such as theta: 500000")
        if self.kind != "theta" and self.factor is None:
            raise ValueError(f"rope of kind {self.kind!r} needs factor, such as factor: 4")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} must be above 0 and below high_freq_factor "
                f"{self.high_freq_factor:g}: use low_freq_factor: 1 and high_freq_factor: 4"
            )
        return self


class StageSettings(Section):
    """One entry of `stages`: training at one context length, for `steps` steps or `tokens` tokens."""

    length: Annotated[Length, Field(ge=2)]
    """Tokens of a row, such as `128k` or `1M` (k is 1,024)."""

    steps: PositiveInt | None = None
    """Optimizer steps; give this or `tokens`."""

    tokens: TokenCount | None = None
    """Tokens to train on, such as `2B` (k is 1,000); give this or `steps`."""

    batch: PositiveInt = 1
    """Rows of a step over all sequence groups; more rows than groups means gradient accumulation."""

    lr: PositiveNumber = 1e-5
    """Peak learning rate."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after its warm-up."""

    warmup: Annotated[Number, Field(ge=0)] = 0.05
    """Warm-up from the last stage's learning rate to `lr`: a share of the steps below 1, else a number of steps."""

    final: Share = 0.1
    """Share of `lr` that is left at the stage's end."""

    rope: RopeSettings | None = None
    """Rotary position embeddings of this stage; unchanged if left out."""

    sp: PositiveInt | None = None
    """Ranks that share one row in this stage; `mesh.sp` if left out."""

    @model_validator(mode="after")
    def _one_duration(self) -> StageSettings:
        if (self.steps is None) == (self.tokens is None):
            given = "neither is given" if self.steps is None else "set the other one to null"
            raise ValueError(f"a stage takes steps or tokens: {given}")
        return self

    @property
    def count(self) -> int:
        """Number of optimizer steps."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return max(1, round(self.tokens / (self.length * self.batch)))


class MeshSettings(Section):
    """`mesh`: degrees of parallelism; the ranks that are left over form data-parallel groups."""

    sp: PositiveInt | Literal["auto"] = "auto"
    """Ranks that share one row (Ulysses); `auto` takes all ranks, up to the model's heads."""

    ring: PositiveInt = 1
    """Ring attention degree; 1 until ring attention exists."""

    replicas: PositiveInt = 1
    """Copies of the sharded weights (hybrid sharding); 1 shards them over all ranks."""

    def refuse_ring(self) -> None:
        """Refuse a ring: only a plan may compare one; training, verification and rehearsal cannot have it."""
        if self.ring > 1:
            raise ConfigError("mesh.ring: ring attention is not there yet: use mesh.ring=1")


# Fields of a memory plan that a user may decide: one value for each layer, and one for all.
_PER_LAYER, _OVERALL = ("layers", "offload"), ("mlp_tile", "loss_tile", "head_groups")


class MemorySettings(Section):
    """`memory`: activation checkpointing. Fields from `layers` on decide by hand; the plan decides the rest."""

    plan: Literal["auto", "none"] = "auto"
    """`auto` keeps as many activations as fit `budget`; `none` leaves memory to autograd."""

    budget: Bytes | None = None
    """Device memory of one rank, such as `60GiB`; three quarters of the device if left out."""

    host_budget: Bytes | None = None
    """Host memory of one rank; three quarters of its part of what is free there if left out."""

    on_host: Literal["nothing", "everything"] = "nothing"
    """`everything` keeps weights and optimizer state in host memory."""

    layers: Annotated[list[Literal["keep", "save", "rebuild", "recompute"]], BeforeValidator(as_list)] = []
    """Checkpointing mode of all layers, or a list with one of each layer."""

    offload: Annotated[list[bool], BeforeValidator(as_list)] = []
    """True to move the saved activations to the host, for all layers or a list with one of each layer."""

    mlp_tile: Length | None = None
    """Tokens of a tile of the MLP."""

    loss_tile: Length | None = None
    """Tokens of a tile of the head and the loss."""

    head_groups: PositiveInt | None = None
    """Groups of heads that attention handles one after the other."""

    @property
    def decided(self) -> dict[str, Any]:
        """Fields that are decided by hand, as `parallelize(memory=...)` takes them."""
        each = {name: value[0] if len(value) == 1 else value for name in _PER_LAYER if (value := getattr(self, name))}
        return each | {name: value for name in _OVERALL if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _check_decided(self) -> MemorySettings:
        if self.decided and self.plan == "none":
            raise ValueError(f"plan=none leaves all to autograd: leave out {', '.join(self.decided)}, or use plan=auto")
        return self


class OptimizerSettings(Section):
    """`optimizer`: AdamW in one of three kinds."""

    name: Literal["adamw", "adamw8bit", "bf16_sr"] = "adamw"
    """`adamw`; `adamw8bit` with 8-bit moments; `bf16_sr` with bf16 weights and stochastic rounding."""

    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)
    """Decay rates of the two moments."""

    eps: PositiveNumber = 1e-8
    """Number added to the denominator."""

    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices and embeddings; biases and norms get none."""

    clip: Annotated[Number, Field(ge=0)] = 1.0
    """Largest norm of the gradients; 0 clips nothing."""

    in_backward: bool = False
    """Step each layer's weights during backward, so that their gradients never exist together; needs clip=0."""


class CheckpointSettings(Section):
    """`checkpoints`: saved every `save_every` steps and at each stage's end."""

    save_every: PositiveInt = 200
    """Steps between checkpoints."""

    keep: PositiveInt = 2
    """Newest checkpoints that stay on disk, besides those at the ends of stages."""

    background: bool = True
    """Write checkpoints while training goes on."""


class MetricsSettings(Section):
    """`metrics`: lines of metrics.jsonl, and trackers."""

    every: PositiveInt = 1
    """Steps between lines."""

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """accelerate's trackers that get the same numbers."""

    project: str = "ithaca"
    """Name of the project in the trackers."""

    apart_every: PositiveInt = 10
    """Steps between lines that also have the time by part and the loss by position."""


class TimeoutSettings(Section):
    """`limits`: bounds after which a run stops."""

    grace: PositiveNumber = 60.0
    """Seconds for saving after a signal to stop."""

    hang: PositiveNumber = 600.0
    """Seconds without progress after which the watchdog ends the run and names the ranks that hang."""

    bad_steps: PositiveInt = 5
    """Steps in a row with a loss or gradient that is not finite, after which the run stops."""


class LaunchSettings(Section):
    """`launch`: processes on this machine."""

    processes: PositiveInt | Literal["auto"] = "auto"
    """Ranks on this machine; `auto` takes all GPUs, or two ranks on the CPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks; `auto` takes GPUs if there are any."""
