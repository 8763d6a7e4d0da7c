"""Models by name: sizes of common architectures without a network, from `known_models.json`.

The table holds hub names, the config values that sizes follow from, and the published number of parameters, which a
test compares with what is counted. A name is found whatever its case, its organisation or an ending that changes no
size ("-Instruct"); another one is refused with the nearest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from ithaca.errors import ConfigError, IthacaError
from ithaca.planning.sizes import ModelSizes

# Endings of names of the same sizes; versions and dates may be left out, but another one is another model.
_SAME_SIZE = re.compile(r"-(instruct|base|chat|it|pt|hf)(?=-|$)", re.IGNORECASE)
_VERSION = re.compile(r"-(v\d+\.\d+|\d{4})(?=-|$)", re.IGNORECASE)
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model a plan can be made for. `positions`: how far it was trained to tell positions apart; None if not said.
    `original`: how far before they were scaled."""

    name: str
    sizes: ModelSizes
    positions: int | None
    original: int | None = None


def known_names() -> list[str]:
    """Hub names of the table, in its order."""
    return list(_table())


def find_model(name: str) -> KnownModel | None:
    """The model of the table that `name` means, or None."""
    wanted = _plain(name)
    for known, entry in _table().items():
        if wanted and wanted in (_plain(known), _plain(_VERSION.sub("", known))):
            return read_config(known, entry["config"])
    return None


def known_config(name: str) -> dict[str, Any] | None:
    """The config values that the table has of the model that `name` means, or None."""
    found = find_model(name)
    return None if found is None else dict(_table()[found.name]["config"])


def endings(name: str) -> list[str]:
    """What a name says of tuning, which changes no size: "instruct", "base"."""
    return [ending.lower() for ending in _SAME_SIZE.findall(name)]


def nearest_models(name: str, count: int = 4) -> list[str]:
    """Names of the table most like `name`."""
    plain = {_plain(known): known for known in _table()}
    return [plain[key] for key in get_close_matches(_plain(name), plain, n=count, cutoff=0.4)]


def read_config(name: str, config: Mapping[str, Any]) -> KnownModel:
    """The model that the content of a config.json describes."""
    try:
        sizes = ModelSizes.from_config(config)
        _check(sizes)
        text = config.get("text_config") or config
        positions = text.get("max_position_embeddings")
        scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
        original = scaling.get(_ORIGINAL) or text.get(_ORIGINAL) or positions
        return KnownModel(name, sizes, *(None if number is None else int(number) for number in (positions, original)))
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


@cache
def _table() -> dict[str, Any]:
    text = files("ithaca.planning").joinpath("known_models.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _plain(name: str) -> str:
    """What tells sizes apart: no organisation, no ending, no punctuation."""
    bare = name.rstrip("/").rsplit("/", 1)[-1].removeprefix("Meta-")
    return re.sub(r"[^a-z0-9]", "", _SAME_SIZE.sub("", bare).lower())
