"""Dotted overrides such as `stages.0.length=64k`, laid over what a run's file holds.

A key below one that the file leaves out starts from that key's default: `lora.rank=8` of a run without `lora` is a
section of its own, and `stages.0.steps=5` changes one number of the default stages, which are those of the run's model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import yaml

from ithaca.errors import ConfigError
from ithaca.mistakes import not_yaml

Settings = dict[str, Any]


def lay_over(given: Mapping[str, Any], overrides: Iterable[str], defaults: Callable[[Settings], Settings]) -> Settings:
    """`given` with the overrides; `defaults`: the whole run of a model section, which may hold a name or nothing."""
    texts = list(overrides)
    # The model decides which stages there are to change, so it is read first, wherever it was typed.
    first = _apply(dict(given), [text for text in texts if text.startswith("model")], {})
    model = first.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    return _apply(dict(given), texts, defaults({"name": name} if isinstance(name, str) else {}))


def _apply(given: Settings, overrides: Iterable[str], defaults: Settings) -> Settings:
    for text in overrides:
        path, found, value = text.partition("=")
        if not found or not path:
            raise ConfigError(f"{text!r} is no override: write key.sub=value, such as stages.0.length=64k")
        try:
            given = _put(given, path.split("."), yaml.safe_load(value), path, defaults)
        except yaml.YAMLError as error:
            raise ConfigError(f"{text!r}{not_yaml(error)}; quote what has brackets or colons") from None
    return given


def _put(node: Any, keys: list[str], value: object, path: str, default: Any) -> Any:
    """A copy of `node` with `value` at the end of `keys`; what the file leaves out starts from `default`."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    node = ({} if default is None else default) if node is None else node
    # One source may be written as no list, and any as its path alone.
    if isinstance(default, list) and not isinstance(node, list) and path.split(".")[1] == "sources":
        node = [node]
    elif isinstance(node, str) and default is None and path.split(".")[1] == "sources":
        node = {"path": node}
    if isinstance(node, list):
        if not key.isdigit() or int(key) > len(node):
            raise ConfigError(f"{path}: {key!r} is no place in a list of {len(node)}: use 0 to {len(node)}")
        at = int(key)
        return [*node[:at], _put(node[at] if at < len(node) else {}, rest, value, path, None), *node[at + 1 :]]
    if not isinstance(node, dict):
        raise ConfigError(
            f"{path}: there is nothing under {key!r}, the value before it is {node!r}: write {path.partition('.' + key)[0]}=..."
        )
    below = default.get(key) if isinstance(default, dict) else None
    return {**node, key: _put(node.get(key), rest, value, path, below)}
