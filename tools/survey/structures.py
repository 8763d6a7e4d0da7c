"""Findings of `ithaca.models.discover` for every exact type, under the structure keys that `parallelize` looks up.

Small models of each type are built in several variants: with the config's defaults, with optional features together and
one by one, without a window, and with the values of every known model of the type. Discovery runs on each variant with a
new key. If two variants share a layer's key and their findings differ, the layer is left out of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ithaca.mesh import Mesh, init_mesh
from ithaca.models.binding import bind, unbind
from ithaca.models.discover.findings import Findings, LogitsRule, discovered, row_of_role
from ithaca.models.discover.logits_path import numbers_read
from ithaca.models.discover.structure import Structure
from ithaca.models.layers.head import head_spec
from ithaca.models.layers.install import on_trial
from ithaca.models.support import decoder_layers
from ithaca.planning.model.architectures import EXPERT_COUNTS
from ithaca.planning.model.known_models import known_config, known_names
from ithaca.verify.small_models.features import build
from ithaca.verify.small_models.types import shrunk, survey_config, without_window
from ithaca.verify.small_models.variants import features_on

Rows = dict[str, Any]
# The factor by which a float is changed to see whether the logits depend on it.
_FACTOR = 1.7


class NotStored(Exception):
    """Raised for a finding that depends on more than the structure, or that the table cannot hold."""


def configs(kind: str) -> Iterator[PreTrainedConfig]:
    """Yield small configs of a type in all variants."""
    on = features_on(kind)
    overrides: list[dict[str, Any]] = [{}, on, without_window(kind), *({key: value} for key, value in on.items())]
    for given in overrides:
        try:
            yield survey_config(kind, **given)
        except (ValueError, TypeError, StrictDataclassError):
            # Some config classes refuse some combinations.
            continue
    for known in map(known_config, known_names()):
        if known is not None and known["model_type"] == kind:
            given = {key: value for key, value in known.items() if key != "model_type"}
            yield AutoConfig.for_model(kind, **{**given, **shrunk(AutoConfig.for_model(kind, **given).to_dict())})


def structures(kind: str) -> tuple[Rows, list[str]]:
    """Return the rows of one type, and the reasons why findings are left out."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_mesh(sp=1, device="cpu")
        rows: Rows = {"models": {}, "layers": {}}
        left_out: list[str] = []
        for config in configs(kind):
            try:
                model = build(config)
                add(rows, model, mesh)
                if any(getattr(config, key, None) for key in EXPERT_COUNTS):
                    # Unless weights are fp64, all experts run in one grouped matrix product.
                    _use_default_experts(model.float())
                    add(rows, model, mesh)
            except Exception as error:
                left_out.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        for part in rows.values():
            for key in [key for key, row in part.items() if row == "differs"]:
                left_out.append(f"two findings of {key}")
                del part[key]
        return (rows if rows["models"] and rows["layers"] else {}), list(dict.fromkeys(left_out))
    finally:
        dist.destroy_process_group()


def _use_default_experts(model: PreTrainedModel) -> None:
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config._experts_implementation = "grouped_mm"


def add(rows: Rows, model: PreTrainedModel, mesh: Mesh) -> None:
    """Run discovery on one model, and add its findings to the rows."""
    layers = decoder_layers(model)
    structure = Structure.of(model, layers)
    if structure is None or not layers:
        raise NotStored("it has no key")
    if structure.model in rows["models"] and set(structure.layers) <= set(rows["layers"]):
        return
    findings = find(model, mesh)
    passing = findings.passing
    if passing.refused or passing.copied or passing.unlinked:
        raise NotStored(f"its layers pass more than hidden states: {passing}")
    if any(role.draws for roles in findings.roles for role in roles):
        raise NotStored("it draws random numbers")
    paths = {module: path for path, module in model.named_modules()}
    around = [[paths[stack], role.main] for stack, role in findings.around]
    _put(rows["models"], structure.model, {"around": around, "logits": logits_row(model, findings)})
    for key, roles in zip(structure.layers, findings.roles, strict=True):
        _put(rows["layers"], key, [row_of_role(role) for role in roles])


def find(model: PreTrainedModel, mesh: Mesh) -> Findings:
    """Run discovery on a model with real weights; the model is unbound again afterwards."""
    binding = bind(model, mesh)
    try:
        return discovered(binding, decoder_layers(model), partial(on_trial, binding), None)
    finally:
        unbind(model)


def _put(rows: Rows, key: str, row: Any) -> None:
    rows[key] = row if rows.get(key, row) == row else "differs"


def logits_row(model: PreTrainedModel, findings: Findings) -> dict[str, Any] | None:
    """Return the config values that determine the scale and cap of the logits; None if the logits are computed whole.

    Each number that the forward reads is changed by itself: the scale must change by the same factor, by its inverse, or
    not at all.
    """
    if findings.logits is None:
        return None
    rule = LogitsRule()
    numbers = {
        name: value for name, value in numbers_read(model) if type(value) in (int, float) and value not in (0, 1)
    }
    same = model.config.get_text_config() is model.config
    for name, value in numbers.items():
        if same and name.startswith("text."):
            continue
        with _changed(model, name, value * _FACTOR if isinstance(value, float) else value * 3):
            spec, factor = head_spec(model), dict(numbers_read(model))[name] / value
        if spec is None:
            raise NotStored(f"its logits depend on {name} otherwise than by a factor")
        if spec.scale != findings.logits.scale:
            up = abs(spec.scale / findings.logits.scale / factor - 1) < 1e-9
            rule = (
                LogitsRule((*rule.times, name), rule.over, rule.softcap)
                if up
                else LogitsRule(rule.times, (*rule.over, name), rule.softcap)
            )
        if spec.softcap != findings.logits.softcap:
            rule = LogitsRule(rule.times, rule.over, name)
    for name, value in [*numbers.items(), ("", 0)]:
        with _changed(model, name, value * _FACTOR if isinstance(value, float) else value * 3):
            if rule.spec(model) != head_spec(model):
                raise NotStored(f"its logits follow from {name or 'its numbers'} by no product")
    return {"times": list(rule.times), "over": list(rule.over), "softcap": rule.softcap}


@contextmanager
def _changed(model: PreTrainedModel, name: str, value: Any) -> Iterator[None]:
    """Inside, the number that the model's forward reads as `name` is `value`; an empty name changes nothing."""
    prefix, _, attribute = name.partition(".")
    owner = {"model": model, "config": model.config, "text": model.config.get_text_config()}.get(prefix)
    if owner is None:
        yield
        return
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)
