"""The request that a mesh is searched for: a model on a machine, what the user decided, and the numerics left to try.

Invariant: what the user decided is never changed; `recipes` and the meshes of `meshes.py` range over the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ithaca.planning.memory_plan import Job, Optimizer
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.traffic import Machine

Precision = Literal["mixed", "bf16"]
HOST_HEADROOM = 0.25
# A run leaves its host no less than this share, whatever the user asks for.
LEAST_HEADROOM = 0.07


class MeshShape(NamedTuple):
    """The degrees of parallelism of a mesh."""

    dp: int
    ring: int
    sp: int

    def __str__(self) -> str:
        return f"dp={self.dp}, sp={self.sp}" if self.ring == 1 else f"dp={self.dp}, ring={self.ring}, sp={self.sp}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The precision of parameters, the optimizer, and True if weights, gradients and optimizer state live on the host."""

    precision: Precision
    optimizer: Optimizer
    on_host: bool = False

    @property
    def numerics(self) -> str:
        kept = "fp32 weights, bf16 computing" if self.precision == "mixed" else "bf16"
        return f"{self.optimizer}, {kept}"

    def __str__(self) -> str:
        return self.numerics + (", all of it on the host" if self.on_host else "")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A model, a machine and what the user decided of the plan; the search decides what is None.

    `batch`: rows a step over all groups. `headroom`, `host_left`: shares of the device and of the host to leave free.
    """

    sizes: ModelSizes
    machine: Machine
    headroom: float = 0.25
    host_left: float | None = None
    batch: int | None = None
    sp: int | None = None
    optimizer: Optimizer | None = None
    precision: Precision | None = None
    on_host: bool | None = None

    @property
    def device_budget(self) -> int:
        return int((1 - self.headroom) * self.machine.device.memory)

    @property
    def host_budget(self) -> int:
        """One rank's share of the host."""
        return int((1 - self.host_headroom) * self.machine.host_memory / self.machine.gpus)

    @property
    def host_headroom(self) -> float:
        """The share of the host to leave free: by default the device's, and at least a quarter."""
        return max(self.headroom, HOST_HEADROOM) if self.host_left is None else self.host_left

    @property
    def budgets(self) -> tuple[int, int]:
        return self.device_budget, self.host_budget


def recipes(request: PlanRequest) -> Iterator[list[Recipe]]:
    """Yield groups of recipes with the same numerics, the most exact first; in each the device before the host.

    The last group takes the fewest bytes of a parameter at every moment: a length that fits at all fits with that group.
    """
    pairs: list[tuple[Precision, Optimizer]] = [("mixed", "adamw"), ("mixed", "adamw8bit"), ("bf16", "bf16_sr")]
    if request.sizes.adapters:
        # Adapters are few: the frozen weights need no fp32 copy, and no optimizer state is worth saving.
        pairs = [("bf16", "adamw")]
    if request.optimizer is not None or request.precision is not None:
        usual: Precision = "bf16" if request.sizes.adapters or request.optimizer == "bf16_sr" else "mixed"
        pairs = [(request.precision or usual, request.optimizer or "adamw")]
    on_host = [False, True] if request.on_host is None else [request.on_host]
    for precision, optimizer in pairs:
        yield [Recipe(precision, optimizer, each) for each in on_host]


def recipes_with_least_memory(request: PlanRequest) -> list[Recipe]:
    """Return the recipes that fit wherever any recipe does."""
    *_, last = recipes(request)
    return last


def job_of(request: PlanRequest, length: int, degrees: MeshShape, recipe: Recipe) -> tuple[Job, int]:
    """Return one rank's job, and the rows that its sequence group takes one after another."""
    rows = (request.batch or degrees.dp) // degrees.dp
    width = 4 if recipe.precision == "mixed" else 2
    # PEFT keeps adapters in fp32; they are cast to the computing dtype.
    casts = recipe.precision == "mixed" or request.sizes.adapters > 0
    alone = request.machine.world == 1 and not casts and not recipe.on_host
    job = Job(
        length=length,
        sp=degrees.sp,
        dp=degrees.dp,
        ring=degrees.ring,
        # On one rank FSDP2 is left out unless it casts or moves the weights.
        weights="none" if alone else "shard",
        weight_bytes=width,
        gradient_bytes=4 if casts else width,
        optimizer=recipe.optimizer,
        accumulate=rows > 1,
        weights_on_host=recipe.on_host,
        gradients_on_host=recipe.on_host,
        optimizer_on_host=recipe.on_host,
    )
    return job, rows
