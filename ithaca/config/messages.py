"""What is wrong with the settings of a run, in a sentence that says what to type instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from ithaca.errors import ConfigError
from ithaca.quantities import at_home

# Pydantic's kinds of problems, in words that need no knowledge of it.
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
    """Unknown keys first, each with the nearest right one: pydantic's own message does not have it."""
    if not isinstance(given, Mapping):
        return
    for key, value in given.items():
        field = section.model_fields.get(key)
        if field is None:
            near = difflib.get_close_matches(str(key), section.model_fields, 1, 0.6)
            inside = _inside(section, str(key), path)
            hint = f"it takes {', '.join(section.model_fields)}"
            hint = f"did you mean {inside or repr(near[0])}?" if inside or near else hint
            where = f" in {path.rstrip('.')}" if path else ""
            raise ConfigError(f"unknown key {key!r}{where}: {hint}")
        for inner in _sections(field.annotation):
            for place, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
                check_keys(inner, item, f"{path}{key}." + ("" if place is None else f"{place}."))


def sentences(problems: Sequence[Any], whole: type[BaseModel]) -> list[str]:
    """Pydantic's problems with `whole`, one sentence for each setting: a word that it takes too stands at the end."""
    said: dict[str, str] = {}
    for problem in problems:
        where = _where(problem)
        if where in said and problem["type"] == "literal_error":
            said[where] += f", or {problem['ctx']['expected']}"
        else:
            said.setdefault(where, _sentence(problem, whole))
    return list(said.values())


def _where(problem: Any) -> str:
    kinds = ("function-", "constrained-", "literal[", "list[")
    return ".".join(str(part) for part in problem["loc"] if not str(part).startswith(kinds))


def _sentence(problem: Any, whole: type[BaseModel]) -> str:
    where = _where(problem)
    message, got = problem["msg"].removeprefix("Value error, "), problem.get("input")
    if problem["type"] == "missing":
        return f"{where} is missing: give it a value"
    if problem["type"] == "value_error":
        return f"{where}: {message}" if where else message
    if problem["type"] == "model_type":
        section = next(one for one in _all_below(whole) if one.__name__ == problem["ctx"]["class_name"])
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
    """Refuse the name of a model that only a folder can have, where there is none."""
    folder = Path(at_home(name))
    if folder.is_dir() or not (folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return
    near = near_paths(folder, "config.json")
    raise ConfigError(f"{typed} {name!r} is no folder: name a folder with config.json, or a hub name{near}")


def near_paths(path: Path, holds: str = "") -> str:
    """Return "; nearest here: ..." with what is called nearly so beside `path`, or nothing.

    `holds`: a file that a folder has to hold; any file or folder if empty.
    """
    try:
        beside = [one.name for one in path.parent.iterdir() if not holds or (one / holds).is_file()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, beside, 3)
    return f"; nearest here: {', '.join(str(path.parent / name) for name in near)}" if near else ""


def not_yaml(error: yaml.YAMLError) -> str:
    """Where a text stops being YAML, and why, to stand after its name."""
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
    return f"{where}: not YAML ({reason})"


def _inside(section: type[BaseModel], key: str, path: str) -> str:
    """Where below `section` the key is, as it is typed; nothing if it is nowhere."""
    for name, field in section.model_fields.items():
        place = f"{path}{name}." + (
            "0." if get_origin(field.annotation) is list or "list" in str(field.annotation) else ""
        )
        for inner in _sections(field.annotation):
            found = f"{place}{key}" if key in inner.model_fields else _inside(inner, key, place)
            if found:
                return found
    return ""


def _all_below(section: type[BaseModel]) -> list[type[BaseModel]]:
    direct = [one for field in section.model_fields.values() for one in _sections(field.annotation)]
    return [section, *(below for one in direct for below in _all_below(one))]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold, through lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (list, Union, Annotated) or hasattr(annotation, "__args__"):
        return [found for inner in get_args(annotation) for found in _sections(inner)]
    return []


def places_of(section: type[BaseModel], name: str) -> list[str]:
    """Return the full names of the settings below `section` with this name or path; those of the nearest name if none has."""
    every = _paths(section, "")
    found = [path for path in every if name in (path, path.replace(".0.", "."), path.rpartition(".")[2])]
    if found:
        return found
    # A section stands for its first key.
    if inside := [path for path in every if name in path.split(".")]:
        return inside[:1]
    near = difflib.get_close_matches(name, {part for path in every for part in path.split(".")}, 1, 0.66)
    return places_of(section, near[0]) if near else []


def _paths(section: type[BaseModel], ahead: str) -> list[str]:
    """Return the full name of every setting below `section`."""
    found = []
    for name, field in section.model_fields.items():
        inner = _sections(field.annotation)
        if not inner:
            found.append(f"{ahead}{name}")
        for below in inner:
            found += _paths(below, f"{ahead}{name}." + ("0." if "list" in str(field.annotation).lower() else ""))
    return found
