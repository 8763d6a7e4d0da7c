"""What a mesh is searched for: a model on a machine, what the user decided, and the numerics that are left to try.

Invariant: what was decided is never changed; `recipes` and the cuts of `cuts.py` range over the rest.
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
# A run leaves its host no less than this, whatever it is asked to.
LEAST_HEADROOM = 0.07


class Degrees(NamedTuple):
    """How the GPUs are cut."""

    dp: int
    ring: int
    sp: int

    def __str__(self) -> str:
        return f"dp={self.dp}, sp={self.sp}" if self.ring == 1 else f"dp={self.dp}, ring={self.ring}, sp={self.sp}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers a parameter is kept in, and whether weights, gradients and optimizer state live on the host."""

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
class Wanted:
    """What a plan is asked for. None and empty are left to the search; `batch` is rows a step over all groups. `headroom`
    and `host_left` are the shares of the device and of the host that are left free."""

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
        """One rank's share."""
        return int((1 - self.host_headroom) * self.machine.host_memory / self.machine.gpus)

    @property
    def host_headroom(self) -> float:
        """Unless it is said, at least a quarter, whatever is left of the device."""
        return max(self.headroom, HOST_HEADROOM) if self.host_left is None else self.host_left

    @property
    def budgets(self) -> tuple[int, int]:
        return self.device_budget, self.host_budget


def recipes(wanted: Wanted) -> Iterator[list[Recipe]]:
    """Ways to keep parameters, the most exact first; in each the device before the host.

    The last takes the fewest bytes of a parameter at every moment: what fits at all fits with that.
    """
    pairs: list[tuple[Precision, Optimizer]] = [("mixed", "adamw"), ("mixed", "adamw8bit"), ("bf16", "bf16_sr")]
    if wanted.sizes.adapters:
        # Adapters are few: the frozen weights need no fp32 copy, and no optimizer state is worth saving.
        pairs = [("bf16", "adamw")]
    if wanted.optimizer is not None or wanted.precision is not None:
        usual: Precision = "bf16" if wanted.sizes.adapters or wanted.optimizer == "bf16_sr" else "mixed"
        pairs = [(wanted.precision or usual, wanted.optimizer or "adamw")]
    places = [False, True] if wanted.on_host is None else [wanted.on_host]
    for precision, optimizer in pairs:
        yield [Recipe(precision, optimizer, place) for place in places]


def leanest(wanted: Wanted) -> list[Recipe]:
    """The recipes that fit wherever any does."""
    *_, last = recipes(wanted)
    return last


def job_of(wanted: Wanted, length: int, degrees: Degrees, recipe: Recipe) -> tuple[Job, int]:
    """One rank's job, and the rows that its sequence group takes one after another."""
    rows = (wanted.batch or degrees.dp) // degrees.dp
    width = 4 if recipe.precision == "mixed" else 2
    # Adapters are kept in fp32, and cast.
    casts = recipe.precision == "mixed" or wanted.sizes.adapters > 0
    alone = wanted.machine.world == 1 and not casts and not recipe.on_host
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
