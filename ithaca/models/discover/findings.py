"""Everything that memory plans need to know of a model's layers, from the survey's table or from runs of the model.

    findings = surveyed(model, layers)                           no run: the table has this structure (`structure.py`)
    findings = discovered(binding, layers, on_trial, device)     runs of a few tokens, on random weights if there are none

Both give the same for the models that the survey has measured; a test holds them to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ithaca.memory.head_loss import LossSpec
from ithaca.models.bound import Binding, unsharded
from ithaca.models.discover.logits_path import numbers_read
from ithaca.models.discover.passing import Passing, found_by, watching
from ithaca.models.discover.random_weights import randomized
from ithaca.models.discover.roles import UnitRole, norms_around
from ithaca.models.discover.structure import Structure
from ithaca.models.discover.trials import OnTrial, roles_of
from ithaca.models.layers.head import bare_head, head_spec
from ithaca.planning.model.architectures import structures_of


@dataclass(frozen=True, slots=True)
class Findings:
    """Roles of each layer's children, norms beside the layers with the module that they hang on, what layers pass to each
    other, and what happens to the logits (None: more than a scale and a cap)."""

    roles: list[list[UnitRole]]
    around: list[tuple[nn.Module, UnitRole]]
    passing: Passing
    logits: LossSpec | None


@dataclass(frozen=True, slots=True)
class LogitsRule:
    """The numbers on a model's way to its logits, by name: their product over another product, and a cap."""

    times: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    softcap: str | None = None

    def spec(self, model: PreTrainedModel) -> LossSpec:
        """Return the specification that these numbers give for one model."""
        numbers: dict[str, Any] = dict(numbers_read(model))
        times, over = (prod((numbers[name] for name in names), start=1.0) for names in (self.times, self.over))
        return LossSpec(scale=times / over, softcap=None if self.softcap is None else numbers[self.softcap])


def surveyed(model: PreTrainedModel, layers: list[nn.Module]) -> Findings | None:
    """Return the survey's findings, None if its table lacks this type or this structure."""
    table = structures_of(str(model.config.model_type))
    # Buffers on the meta device take no part, and neither do devices and dtypes.
    structure = Structure.of(model, layers) if table and layers else None
    if structure is None or structure.model not in table["models"] or not set(structure.layers) <= set(table["layers"]):
        return None
    return _from_rows(model, structure, table)


def _from_rows(model: PreTrainedModel, structure: Structure, table: Mapping[str, Any]) -> Findings:
    row = table["models"][structure.model]
    around = [(model.get_submodule(path), UnitRole((name,), name, wide=False)) for path, name in row["around"]]
    rule = None if row["logits"] is None or bare_head(model) is None else LogitsRule(**row["logits"])
    return Findings(
        [[_role(unit) for unit in table["layers"][key]] for key in structure.layers],
        around,
        Passing(),
        None if rule is None else rule.spec(model),
    )


def _role(unit: Mapping[str, Any]) -> UnitRole:
    return UnitRole(**{**unit, "names": tuple(unit["names"])})


def row_of_role(role: UnitRole) -> dict[str, Any]:
    """Return a role as the table has it: what differs from a role's defaults, `draws` never."""
    return {key: value for key, value in asdict(role).items() if key in ("names", "main", "wide") or value}


def discovered(binding: Binding, layers: list[nn.Module], on_trial: OnTrial, device: torch.device | None) -> Findings:
    """Run the model on a few tokens, watch its layers, and try their units.

    `device`: where weights on the meta device get random numbers for the time of the runs; None if all weights are real.
    """
    model = binding.model
    weights = nullcontext() if device is None else randomized(model, layers, device)
    with weights, unsharded(model):
        with watching(model, layers) as watch:
            around = norms_around(model, layers)
        passing = found_by(watch)
        roles = roles_of(model, layers, on_trial, silence=passing.refused is None)
        return Findings(roles, around, passing, head_spec(model))
