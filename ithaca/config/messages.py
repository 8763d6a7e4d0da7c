"""Messages about mistakes in a run's settings: one sentence each, with the text to type instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from ithaca.errors import ConfigError
from ithaca.quantities import expand_home

# Pydantic's types of errors, in words that need no knowledge of pydantic.
_NEEDED = {
    "bool_parsing": "true or false is needed",
    "bool_type": "true or false is needed",
    "dict_type": "keys with values are needed, such as {{key: value}}",
    "float_parsing": "a number is needed",
    "float_type": "a number is needed",
    "greater_than": "more than {gt} is needed",
    "greater_than_equal": "at least {ge} is needed",
    "int_from_float": "a whole number is needed",
    "int_parsing": "a whole number is needed",
    "int_type": "a whole number is needed",
    "less_than": "less than {lt} is needed",
    "less_than_equal": "at most {le} is needed",
    "literal_error": "choose {expected}",
    "string_type": "a text is needed",
    "too_short": "at least {min_length} is needed",
}


def check_keys(section: type[BaseModel], given: object, path: str = "") -> None:
    """Refuse an unknown key with the nearest right one, which pydantic's own message does not have."""
    if not isinstance(given, Mapping):
        return
    for key, value in given.items():
        field = section.model_fields.get(key)
        if field is None:
            near = difflib.get_close_matches(str(key), section.model_fields, 1, 0.6)
            below = next((name for name, _ in _all_keys(section, path) if name.rpartition(".")[2] == key), "")
            hint = f"did you mean {below or repr(near[0])}?" if below or near else ""
            hint = hint or f"it takes {', '.join(section.model_fields)}"
            where = f" in {path.rstrip('.')}" if path else ""
            raise ConfigError(f"unknown key {key!r}{where}: {hint}")
        for inner in _sections(field.annotation):
            for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
                check_keys(inner, item, f"{path}{key}." + ("" if index is None else f"{index}."))


def sentences(problems: Sequence[Any], whole: type[BaseModel]) -> list[str]:
    """Return one sentence for each setting that pydantic refuses; words that a setting also takes stand at its end."""
    by_setting: dict[str, str] = {}
    for problem in problems:
        where = _setting(problem)
        if where in by_setting and problem["type"] == "literal_error":
            by_setting[where] += f", or {problem['ctx']['expected']}"
        else:
            by_setting.setdefault(where, _sentence(problem, whole))
    return list(by_setting.values())


def _setting(problem: Any) -> str:
    """Return the setting's name without the parts that pydantic adds for validators and unions."""
    kinds = ("function-", "constrained-", "literal[", "list[")
    return ".".join(str(part) for part in problem["loc"] if not str(part).startswith(kinds))


def _sentence(problem: Any, whole: type[BaseModel]) -> str:
    where = _setting(problem)
    message, got = problem["msg"].removeprefix("Value error, "), problem.get("input")
    if problem["type"] == "missing":
        return f"{where} is missing: give it a value"
    if problem["type"] == "value_error":
        return f"{where}: {message}" if where else message
    if problem["type"] == "model_type":
        section = next(each for each in _all_sections(whole) if each.__name__ == problem["ctx"]["class_name"])
        key, field = next(iter(section.model_fields.items()))
        plain = isinstance(field.default, str | int | float) and not field.is_required()
        example = got if isinstance(got, str) else field.default if plain else "..."
        return f"{where}: got {got!r}: it is a section, write its keys, such as {where}.{key}={example}"
    if problem["type"] == "list_type":
        return f"{where}: got {got!r}: a list is needed, such as {where}=[...]"
    needed = _NEEDED.get(problem["type"])
    ours = f"{message[0].lower()}{message[1:]}" if needed is None else needed.format(**problem.get("ctx", {}))
    return f"{where}: got {got!r}: {ours}"


def check_folder(name: str, typed: str) -> None:
    """Refuse a model's name that only a folder can have, if there is no such folder."""
    folder = Path(expand_home(name))
    if folder.is_dir() or not (folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return
    hint = did_you_mean(list_near_paths(folder, "config.json"), "name a folder with config.json, or a hub name")
    raise ConfigError(f"{typed} {name!r}: no such folder here: {hint}")


def near_paths(path: Path, holds: str = "") -> str:
    """Return "; nearest here: ..." with similar names beside `path`; empty if there are none."""
    near = list_near_paths(path, holds)
    return f"; nearest here: {', '.join(near)}" if near else ""


def list_near_paths(path: Path, holds: str = "") -> list[str]:
    """Return the paths beside `path` with similar names, the nearest first.

    `holds`: a file that a folder has to hold; any file or folder if empty.
    """
    try:
        beside = [other.name for other in path.parent.iterdir() if not holds or (other / holds).is_file()]
    except OSError:
        return []
    return [str(path.parent / name) for name in difflib.get_close_matches(path.name, beside, 3)]


def did_you_mean(names: Sequence[str], otherwise: str) -> str:
    """Return "did you mean A or B?", or `otherwise` if there are no names."""
    return f"did you mean {' or '.join(names)}?" if names else otherwise


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """Return the line, the column and the reason of a YAML error, to follow the file's name."""
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
    return f"{where}: not YAML ({reason})"


def find_settings(section: type[BaseModel], name: str) -> list[str]:
    """Return the full names of the settings with this name or path; those of the nearest name if there are none."""
    every = [path for path, is_section in _all_keys(section, "") if not is_section]
    found = [path for path in every if name in (path, path.replace(".0.", "."), path.rpartition(".")[2])]
    if found:
        return found
    # A section's name stands for its first key.
    if inside := [path for path in every if name in path.split(".")]:
        return inside[:1]
    near = difflib.get_close_matches(name, {part for path in every for part in path.split(".")}, 1, 0.66)
    return find_settings(section, near[0]) if near else []


def _all_keys(section: type[BaseModel], path: str) -> Iterator[tuple[str, bool]]:
    """Yield the full name of every key below `section`, and True if the key is a section itself."""
    for name, field in section.model_fields.items():
        inner = _sections(field.annotation)
        yield f"{path}{name}", bool(inner)
        for below in inner:
            yield from _all_keys(below, f"{path}{name}." + ("0." if "list" in str(field.annotation).lower() else ""))


def _all_sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    direct = [inner for field in section.model_fields.values() for inner in _sections(field.annotation)]
    return [section, *(below for inner in direct for below in _all_sections(inner))]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a field may hold, through lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (list, Union, Annotated) or hasattr(annotation, "__args__"):
        return [found for inner in get_args(annotation) for found in _sections(inner)]
    return []
