"""Dotted overrides such as `stages.0.length=64k`, laid over what a run's file holds.

A key below one that the file leaves out starts from that key's default: `lora.rank=8` of a run without `lora` is a
section of its own, and `stages.0.steps=5` changes one number of the default stages, which are those of the run's model.

Files and overrides are read by one reader of YAML, whose numbers are those of YAML 1.2: `1e3` is one, `010` is ten and no
octal, `1:30` and dates are texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import yaml

from ithaca.config.messages import not_yaml
from ithaca.errors import ConfigError

Settings = dict[str, Any]

_TAG = "tag:yaml.org,2002:"
_OTHERWISE = {f"{_TAG}{kind}" for kind in ("int", "float", "timestamp")}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS = {
    first: [pair for pair in pairs if pair[0] not in _OTHERWISE]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for first in "-+.0123456789":
    _RESOLVERS.setdefault(first, []).extend([(f"{_TAG}int", _INT), (f"{_TAG}float", _FLOAT)])


class Strict(yaml.SafeLoader):
    """Plain data only, and no key twice: YAML's own readers keep the last one without a word."""

    yaml_implicit_resolvers = _RESOLVERS

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                line = node.value[at][0].start_mark.line + 1
                raise ConfigError(f", line {line}: the key {key!r} is there twice: leave one of them")
        return super().construct_mapping(node, deep=deep)


class Plain(yaml.SafeDumper):
    """Writes what `Strict` reads back the same: a text that would be a number there is quoted."""

    yaml_implicit_resolvers = _RESOLVERS


def read_yaml(text: str) -> Any:
    """The content of a file or of a value; ConfigError, to stand after its name, says where it is no YAML."""
    try:
        return yaml.load(text, Loader=Strict)
    except yaml.YAMLError as error:
        raise ConfigError(not_yaml(error)) from None
    except RecursionError:
        raise ConfigError(": not YAML (nested too deep)") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f": not YAML ({error})") from None


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
            content = read_yaml(value)
        except ConfigError as error:
            hint = "; quote what has brackets or colons" if "not YAML" in str(error) else ""
            raise ConfigError(f"{text!r}{error}{hint}") from None
        given = _put(given, path.split("."), content, path, defaults)
    return given


def _put(node: Any, keys: list[str], value: object, path: str, default: Any) -> Any:
    """A copy of `node` with `value` at the end of `keys`; what the file leaves out starts from `default`."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    left_out = node is None or node is default
    node = ({} if default is None else default) if node is None else node
    # One source may be written as no list, and any as its path alone.
    if isinstance(default, list) and not isinstance(node, list) and path.split(".")[1] == "sources":
        node = [node]
    elif isinstance(node, str) and default is None and path.split(".")[1] == "sources":
        node = {"path": node}
    if isinstance(node, list):
        if not key.isdigit() or int(key) > len(node):
            raise ConfigError(f"{path}: {key!r} is no place in a list of {len(node)}: {_place(path, keys, len(node))}")
        at = int(key)
        # How the default's documents are read is nothing to another path.
        fresh = at >= len(node) or (left_out and rest == ["path"])
        return [*node[:at], _put({} if fresh else node[at], rest, value, path, None), *node[at + 1 :]]
    if not isinstance(node, dict):
        raise ConfigError(
            f"{path}: there is nothing under {key!r}, the value before it is {node!r}: write {path.partition('.' + key)[0]}=..."
        )
    below = default.get(key) if isinstance(default, dict) else None
    return {**node, key: _put(node.get(key), rest, value, path, below)}


def _place(path: str, keys: list[str], places: int) -> str:
    """Return what to type instead of a path in which `keys[0]` stands where a list index is needed."""
    ahead = path.split(".")[: -len(keys)]
    if keys[0].lstrip("-").isdigit():
        return f"use 0 to {places}"
    whole = ".".join(ahead)
    return f"write {'.'.join([*ahead, '0', *keys])}=... for the first of them, or {whole}=... for the whole list"
