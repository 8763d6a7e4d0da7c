"""Names: no class name and no file name twice in a package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePosixPath

from tools.lint.fault import Fault, parse

# File names that may stand in several folders, each because a tool or Python asks for the name.
FILES_ALLOWED_TWICE = ("__init__.py", "__main__.py")


def class_name_faults(sources: Mapping[str, str]) -> list[Fault]:
    """Return the classes whose name another class of the package has, private and nested classes counted."""
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append((path, node.lineno))
    faults = []
    for name, found in places.items():
        for path, line in found if len(found) > 1 else ():
            others = ", ".join(f"{other}:{number}" for other, number in found if (other, number) != (path, line))
            faults.append(Fault(path, line, f"class {name} is defined in {others} too: rename one of them"))
    return faults


def file_name_faults(sources: Mapping[str, str]) -> list[Fault]:
    """Return the files whose name a file of another folder has, but for `FILES_ALLOWED_TWICE`."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources:
        places[PurePosixPath(path).name].append(path)
    faults = []
    for name, found in places.items():
        if len(found) > 1 and name not in FILES_ALLOWED_TWICE:
            for path in found:
                others = ", ".join(other for other in found if other != path)
                faults.append(Fault(path, 1, f"{others} has the same file name: rename one of them"))
    return faults
