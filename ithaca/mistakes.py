"""What is wrong with the settings of a run, in a sentence that says what to type instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from ithaca.errors import ConfigError


def check_keys(section: type[BaseModel], given: object, path: str = "") -> None:
    """Unknown keys first, each with the nearest right one: pydantic's own message does not have it."""
    if not isinstance(given, Mapping):
        return
    for key, value in given.items():
        field = section.model_fields.get(key)
        if field is None:
            near = difflib.get_close_matches(str(key), section.model_fields, 1, 0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(section.model_fields)}"
            where = f" in {path.rstrip('.')}" if path else ""
            raise ConfigError(f"unknown key {key!r}{where}: {hint}")
        for inner in _sections(field.annotation):
            for place, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
                check_keys(inner, item, f"{path}{key}." + ("" if place is None else f"{place}."))


def sentence(problem: Any, whole: type[BaseModel]) -> str:
    """One of pydantic's problems with `whole`, in our words."""
    where = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("function-", "constrained-")))
    message, got = problem["msg"].removeprefix("Value error, "), problem.get("input")
    if problem["type"] in ("value_error", "missing"):
        return f"{where}: {message}" if where else message
    if problem["type"] == "model_type":
        section = next(one for one in _all_below(whole) if one.__name__ == problem["ctx"]["class_name"])
        key, field = next(iter(section.model_fields.items()))
        example = got if isinstance(got, str) else "..." if field.is_required() else field.default
        return f"{where}: got {got!r}: it is a section, write its keys, such as {where}.{key}={example}"
    if problem["type"] == "list_type":
        return f"{where}: got {got!r}: a list is needed, such as {where}=[...]"
    return f"{where}: got {got!r}: {message[0].lower()}{message[1:]}"


def check_folder(name: str, typed: str) -> None:
    """Refuse the name of a model that only a folder can have, where there is none."""
    folder = Path(name).expanduser()
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
