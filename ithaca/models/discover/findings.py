"""Findings: the facts about a model's layers that memory plans need, from the survey's table or from runs of the model.

    findings = surveyed(model, layers)                           no run: architectures.json has this structure
    findings = discovered(binding, layers, on_trial, device)     runs of a few tokens, on random weights if need be

        roles     [[norm, MLP], [norm, MLP], ...]     tiled units of each layer                 roles.py, trials.py
        around    [(model.model, norm)]               norms beside the layers                   roles.py
        passing   linked, nothing passed on           tensors that layers hand to each other    passing.py
        logits    scale 1, no cap                     operations between head and logits        logits_path.py

Both functions return the same for every surveyed model: tests/models/discover/test_structure.py compares them.
"""

from __future__ import annotations

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
from ithaca.models.discover.passing import Passing, passing_from, watching
from ithaca.models.discover.random_weights import randomized
from ithaca.models.discover.roles import UnitRole, norms_around
from ithaca.models.discover.structure import Structure
from ithaca.models.discover.trials import OnTrial, roles_of
from ithaca.models.layers.head import bare_head, head_spec
from ithaca.planning.model.architectures import structures_of


@dataclass(frozen=True, slots=True)
class Findings:
    """Facts about one model's layers.

    `roles`: units of each layer. `around`: norms beside the layers, each with its parent module. `passing`: tensors that
    layers hand to each other. `logits`: scale and softcap of the logits, None if the model does anything else to them.
    """

    roles: list[list[UnitRole]]
    around: list[tuple[nn.Module, UnitRole]]
    passing: Passing
    logits: LossSpec | None


@dataclass(frozen=True, slots=True)
class LogitsRule:
    """Names of the config values that scale the logits: a product of `times` divided by a product of `over`, and a cap."""

    times: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    softcap: str | None = None

    def spec(self, model: PreTrainedModel) -> LossSpec:
        """Return the scale and softcap for one model's config values."""
        numbers: dict[str, Any] = dict(numbers_read(model))
        times, over = (prod((numbers[name] for name in names), start=1.0) for names in (self.times, self.over))
        return LossSpec(scale=times / over, softcap=None if self.softcap is None else numbers[self.softcap])


def surveyed(model: PreTrainedModel, layers: list[nn.Module]) -> Findings | None:
    """Return the survey's findings; None if its table lacks this type or this structure."""
    table = structures_of(str(model.config.model_type))
    structure = Structure.of(model, layers) if table and layers else None
    if structure is None or structure.model not in table["models"] or not set(structure.layers) <= set(table["layers"]):
        return None
    row = table["models"][structure.model]
    around = [(model.get_submodule(path), UnitRole((name,), name, wide=False)) for path, name in row["around"]]
    roles = [
        [UnitRole(**{**unit, "names": tuple(unit["names"])}) for unit in table["layers"][key]]
        for key in structure.layers
    ]
    rule = None if row["logits"] is None or bare_head(model) is None else LogitsRule(**row["logits"])
    return Findings(
        roles,
        around,
        # The survey stores no structure whose layers pass more than hidden states to each other.
        Passing(),
        None if rule is None else rule.spec(model),
    )


def row_of_role(role: UnitRole) -> dict[str, Any]:
    """Return the role's row in the table: its names, and the fields that differ from their defaults."""
    return {key: value for key, value in asdict(role).items() if key in ("names", "main", "wide") or value}


def discovered(binding: Binding, layers: list[nn.Module], on_trial: OnTrial, device: torch.device | None) -> Findings:
    """Run the model on a few tokens, record its layers, and try their units.

    `device`: the device of random weights for a model on the meta device; None if all weights are real.
    """
    model = binding.model
    weights = nullcontext() if device is None else randomized(model, layers, device)
    with weights, unsharded(model):
        with watching(model, layers) as watch:
            around = norms_around(model, layers)
        passing = passing_from(watch)
        roles = roles_of(model, layers, on_trial, find_silent=passing.refused is None)
        return Findings(roles, around, passing, head_spec(model))
