"""Models by name: sizes of common architectures without network access, from `known_models.json`.

    find_model("meta-llama/llama-3.1-8b-instruct")    KnownModel(name="meta-llama/Llama-3.1-8B", sizes=..., ...)
    nearest_models("llama-3.1-9b")                     names to offer in an error

The table holds hub names, the config values that determine sizes, and the published number of parameters, which a test
compares with the count. "inside" is the outer model_type if the config is a multimodal model's text model. The lookup
ignores case, the organisation and endings that change no size ("-Instruct").
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
from ithaca.planning.model.config_names import cautions_of, common_config, counted_by_names
from ithaca.planning.model.model_sizes import ModelSizes

# Endings that change no size. Versions and dates may be left out of a name, but a different one is a different model.
_SAME_SIZE = re.compile(r"-(instruct|base|chat|it|pt|hf)(?=-|$)", re.IGNORECASE)
_VERSION = re.compile(r"-(v\d+\.\d+|\d{4})(?=-|$)", re.IGNORECASE)
_ORIGINAL = "original_max_position_embeddings"
# Counts the sizes of a model built from a config; None if transformers cannot build one.
Count = Callable[[str, Mapping[str, Any]], ModelSizes | None]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be planned.

    `positions`: the positions of its training, None if unknown. `original`: its positions before RoPE scaling. `kind`: its
    model_type, that of the whole model if it is multimodal. `cautions`: warnings about a plan, by subject.
    """

    name: str
    sizes: ModelSizes
    positions: int | None
    original: int | None = None
    kind: str = ""
    cautions: Mapping[str, str] = field(default_factory=dict)

    @property
    def longest_row(self) -> int | None:
        """Return the length of the table of learned positions; None if positions have no such limit."""
        return self.positions if facts_of(self.sizes.name).learned_positions else None


def known_names() -> list[str]:
    """Return the hub names of the table, in its order."""
    return list(_table())


def find_model(name: str) -> KnownModel | None:
    """Return the model of the table with this name; None if there is none."""
    plain = _plain(name)
    for known, entry in _table().items():
        if plain and plain in (_plain(known), _plain(_VERSION.sub("", known))):
            model, outer = read_config(known, entry["config"]), entry.get("inside")
            if outer is None:
                return model
            # A multimodal model's row holds the config of its text model alone.
            cautions = cautions_of({"model_type": outer, "text_config": entry["config"]})
            return replace(model, kind=outer, cautions=cautions)
    return None


def known_config(name: str) -> dict[str, Any] | None:
    """Return the table's config values of the model with this name; None if there is none."""
    found = find_model(name)
    return None if found is None else dict(_table()[found.name]["config"])


def endings(name: str) -> list[str]:
    """Return the endings of a name that describe its tuning, such as "instruct" or "base"."""
    return [ending.lower() for ending in _SAME_SIZE.findall(name)]


def nearest_models(name: str, count: int = 4) -> list[str]:
    """Return the names of the table most similar to `name`, without `name` itself."""
    plain = {_plain(known): known for known in _table() if known.lower() != name.lower()}
    return [plain[key] for key in get_close_matches(_plain(name), plain, n=count, cutoff=0.4)]


def read_config(name: str, config: Mapping[str, Any], count: Count | None = None) -> KnownModel:
    """Return the model that a config.json's content describes.

    `count`: counts sizes on a built model, for architectures whose config does not determine them; None to build nothing.
    """
    try:
        check_config(config)
        counted = None if count is None or counted_by_names(config) else count(name, config)
        sizes = counted or ModelSizes.from_config(config)
        _check_sizes(sizes)
        text = common_config(config)
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


def _check_sizes(sizes: ModelSizes) -> None:
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
    """Return the name in lower case without organisation, ending and punctuation."""
    bare = name.rstrip("/").rsplit("/", 1)[-1].removeprefix("Meta-")
    return re.sub(r"[^a-z0-9]", "", _SAME_SIZE.sub("", bare).lower())
