"""Models by name: sizes of common architectures without a network, from `known_models.json`.

The table holds hub names, the config values that sizes follow from, and the published number of parameters, which a
test compares with what is counted; "inside" is the model_type of the whole where the config is its text model's. A name
is found whatever its case, its organisation or an ending that changes no size ("-Instruct"); another one is refused with
the nearest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from ithaca.errors import ConfigError, IthacaError
from ithaca.planning.model.architectures import facts_of
from ithaca.planning.model.config_check import check_config
from ithaca.planning.model.config_names import cautions_of, counted_by_names, text_of
from ithaca.planning.model.model_sizes import ModelSizes

# Endings of names of the same sizes; versions and dates may be left out, but another one is another model.
_SAME_SIZE = re.compile(r"-(instruct|base|chat|it|pt|hf)(?=-|$)", re.IGNORECASE)
_VERSION = re.compile(r"-(v\d+\.\d+|\d{4})(?=-|$)", re.IGNORECASE)
_ORIGINAL = "original_max_position_embeddings"


# Counts the parameters of a config on the model itself; None where it has no model.
Count = Callable[[str, Mapping[str, Any]], ModelSizes | None]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model a plan can be made for. `positions`: how far it was trained to tell positions apart; None if not said.
    `original`: how far before they were scaled. `kind`: its model_type, which is not its text model's where that is
    part of it. `cautions`: what its config says that a plan does not cover."""

    name: str
    sizes: ModelSizes
    positions: int | None
    original: int | None = None
    kind: str = ""
    cautions: Mapping[str, str] = field(default_factory=dict)

    @property
    def ends(self) -> int | None:
        """No row is longer than this: positions that are a table end with it."""
        return self.positions if facts_of(self.sizes.name).learned_positions else None


def known_names() -> list[str]:
    """Hub names of the table, in its order."""
    return list(_table())


def find_model(name: str) -> KnownModel | None:
    """The model of the table that `name` means, or None."""
    wanted = _plain(name)
    for known, entry in _table().items():
        if wanted and wanted in (_plain(known), _plain(_VERSION.sub("", known))):
            return _from_table(known, entry)
    return None


def _from_table(name: str, entry: Mapping[str, Any]) -> KnownModel:
    """Of a model that also sees images the table has the text model alone, which is what known_config is of."""
    known, outer = read_config(name, entry["config"]), entry.get("inside")
    if outer is None:
        return known
    return replace(known, kind=outer, cautions=cautions_of({"model_type": outer, "text_config": entry["config"]}))


def known_config(name: str) -> dict[str, Any] | None:
    """The config values that the table has of the model that `name` means, or None."""
    found = find_model(name)
    return None if found is None else dict(_table()[found.name]["config"])


def endings(name: str) -> list[str]:
    """What a name says of tuning, which changes no size: "instruct", "base"."""
    return [ending.lower() for ending in _SAME_SIZE.findall(name)]


def nearest_models(name: str, count: int = 4) -> list[str]:
    """Names of the table most like `name`, which is not among them: who has typed it gains nothing by it."""
    plain = {_plain(known): known for known in _table() if known.lower() != name.lower()}
    return [plain[key] for key in get_close_matches(_plain(name), plain, n=count, cutoff=0.4)]


def read_config(name: str, config: Mapping[str, Any], count: Count | None = None) -> KnownModel:
    """The model that the content of a config.json describes.

    `count` gives the sizes of its modules where its names do not say them; None for sizes by names alone.
    """
    try:
        check_config(config)
        counted = None if count is None or counted_by_names(config) else count(name, config)
        sizes = counted or ModelSizes.from_config(config)
        _check(sizes)
        text = text_of(config)
        positions = text.get("max_position_embeddings")
        scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
        original = scaling.get(_ORIGINAL) or text.get(_ORIGINAL) or positions
        reach, before = (None if number is None else int(number) for number in (positions, original))
        if min(reach or 1, before or 1) < 1:
            raise ValueError(f"{reach} positions, {before} before they were stretched")
        return KnownModel(
            name,
            sizes,
            reach,
            before,
            str(config.get("model_type", "")),
            cautions_of(config, built=counted is not None),
        )
    except IthacaError as error:
        raise ConfigError(f"{name}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} has values that no causal language model has ({type(error).__name__}: {error}): its own "
            "config.json is needed"
        ) from None


def _check(sizes: ModelSizes) -> None:
    counts = (sizes.hidden, sizes.heads, sizes.kv_heads, sizes.key_size, sizes.value_size, sizes.vocabulary)
    if min(*counts, len(sizes.layers)) < 1 or sizes.heads % sizes.kv_heads:
        raise ValueError(
            f"{sizes.heads} heads over {sizes.kv_heads} key-value heads of {sizes.key_size}, {len(sizes.layers)} layers"
        )
    if max(layer.width for layer in sizes.layers) < 1:
        raise ValueError("no layer has an MLP")
    for layer in sizes.layers:
        if layer.width < 0 or (layer.window or 1) < 1 or layer.experts_per_token > max(1, layer.experts):
            raise ValueError(
                f"an MLP of {layer.width}, a window of {layer.window}, {layer.experts_per_token} of {layer.experts} experts"
            )


@cache
def _table() -> dict[str, Any]:
    text = files("ithaca.planning.model").joinpath("known_models.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _plain(name: str) -> str:
    """What tells sizes apart: no organisation, no ending, no punctuation."""
    bare = name.rstrip("/").rsplit("/", 1)[-1].removeprefix("Meta-")
    return re.sub(r"[^a-z0-9]", "", _SAME_SIZE.sub("", bare).lower())
