"""Overrides such as `stages.0.length=64k`, laid over the content of a run file; and the YAML reader of both.

A key below one that the file leaves out starts from that key's default: `lora.rank=8` of a run without `lora` is a new
section, and `stages.0.steps=5` changes one number of the default stages, which depend on the run's model.

Numbers are those of YAML 1.2, not PyYAML's 1.1: `1e3` is a number, `010` is ten, `1:30` and dates are texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import yaml

from ithaca.config.messages import describe_yaml_error
from ithaca.errors import ConfigError

Tree = dict[str, Any]

_TAG = "tag:yaml.org,2002:"
_REPLACED = {f"{_TAG}{kind}" for kind in ("int", "float", "timestamp")}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS = {
    first: [pair for pair in pairs if pair[0] not in _REPLACED]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for first in "-+.0123456789":
    _RESOLVERS.setdefault(first, []).extend([(f"{_TAG}int", _INT), (f"{_TAG}float", _FLOAT)])


class StrictLoader(yaml.SafeLoader):
    """Loader of plain data; a key that stands twice is refused, where PyYAML silently keeps the last."""

    yaml_implicit_resolvers = _RESOLVERS

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                line = node.value[at][0].start_mark.line + 1
                raise ConfigError(f", line {line}: the key {key!r} is there twice: leave one of them")
        return super().construct_mapping(node, deep=deep)


class PlainDumper(yaml.SafeDumper):
    """Dumper whose output `StrictLoader` reads back unchanged: a text that looks like a number there is quoted."""

    yaml_implicit_resolvers = _RESOLVERS


def read_yaml(text: str) -> Any:
    """Return the content of a file or a value; a ConfigError's message is made to follow the file's name."""
    try:
        return yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(describe_yaml_error(error)) from None
    except RecursionError:
        raise ConfigError(": not YAML (nested too deep)") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f": not YAML ({error})") from None


def apply_overrides(given: Mapping[str, Any], overrides: Iterable[str], defaults: Callable[[Tree], Tree]) -> Tree:
    """Return `given` with the overrides; `defaults` makes the whole default run of a model section."""
    texts = list(overrides)
    # The default stages depend on the model, so overrides of the model come first, wherever they were typed.
    first = _apply(dict(given), [text for text in texts if text.startswith("model")], {})
    model = first.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    return _apply(dict(given), texts, defaults({"name": name} if isinstance(name, str) else {}))


def _apply(given: Tree, overrides: Iterable[str], defaults: Tree) -> Tree:
    for text in overrides:
        path, found, value = text.partition("=")
        if not found or not path:
            raise ConfigError(f"{text!r} is no override: write key.sub=value, such as stages.0.length=64k")
        try:
            content = read_yaml(value)
        except ConfigError as error:
            hint = "; quote what has brackets or colons" if "not YAML" in str(error) else ""
            raise ConfigError(f"{text!r}{error}{hint}") from None
        given = _set(given, path.split("."), content, path, defaults)
    return given


def _set(node: Any, keys: list[str], value: object, path: str, default: Any) -> Any:
    """Return a copy of `node` with `value` at the end of `keys`; an absent node starts from `default`."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    left_out = node is None or node is default
    node = ({} if default is None else default) if node is None else node
    # `sources` may be written as one source instead of a list, and a source as its path alone.
    in_sources = path.split(".")[1:2] == ["sources"]
    if isinstance(default, list) and not isinstance(node, list) and in_sources:
        node = [node]
    elif isinstance(node, str) and default is None and in_sources:
        node = {"path": node}
    if isinstance(node, list):
        if not key.isdigit() or int(key) > len(node):
            hint = _list_hint(path, keys, len(node))
            raise ConfigError(f"{path}: {key!r} is no place in a list of {len(node)}: {hint}")
        at = int(key)
        # A new path leaves the default source's format behind: that format was chosen for the default documents.
        fresh = at >= len(node) or (left_out and rest == ["path"])
        return [*node[:at], _set({} if fresh else node[at], rest, value, path, None), *node[at + 1 :]]
    if not isinstance(node, dict):
        parent = path.partition("." + key)[0]
        raise ConfigError(
            f"{path}: there is nothing under {key!r}, the value before it is {node!r}: write {parent}=..."
        )
    below = default.get(key) if isinstance(default, dict) else None
    return {**node, key: _set(node.get(key), rest, value, path, below)}


def _list_hint(path: str, keys: list[str], length: int) -> str:
    """Return the text to type instead of a path in which `keys[0]` stands where a list index is needed."""
    if keys[0].lstrip("-").isdigit():
        return f"use 0 to {length}"
    before = path.split(".")[: -len(keys)]
    first = ".".join([*before, "0", *keys])
    return f"write {first}=... for the first of them, or {'.'.join(before)}=... for the whole list"
