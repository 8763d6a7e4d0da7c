"""Floors: a file of ithaca/ imports from floors with smaller numbers only.

        cli                                      8   imports from every floor below
        verify  rehearse  machine  launch        7   these four do not import each other
        ...
        sequence  planning                       1
        errors  config  mesh  ranks  handle ...  0   importable from everywhere

A reader of one folder therefore needs to know the folders below it and nothing else. Two libraries are held to floors
too: transformers is imported by models/ and by the floors above the core, torch by no file that `ithaca plan` loads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.lint.fault import Fault, parse, top_name

FLOORS = (
    (
        "exit_codes",
        "constants",
        "errors",
        "arguments",
        "quantities",
        "heads",
        "mesh",
        "ranks",
        "atomic",
        "handle",
        "config",
    ),
    ("sequence", "planning"),
    ("attention", "memory"),
    ("state", "data"),
    ("models",),
    ("parallelize", "loss", "report"),
    ("training", "integrations"),
    ("verify", "rehearse", "machine", "launch"),
    ("cli",),
    ("__main__",),
)
NUMBERS = {name: number for number, names in enumerate(FLOORS) for name in names}
# Floor 0 is importable from everywhere, from its own files too.
SHARED = FLOORS[0]
# Part of floor 0, and these two import nothing of ithaca.
BOTTOM = ("exit_codes", "constants")
# Re-exports from every floor, on first use.
EXEMPT = "ithaca/__init__.py"
# The highest floor of the core: on it and below, transformers is imported by models/ alone.
CORE = 5
WITHOUT_TORCH = (
    "atomic",
    "exit_codes",
    "constants",
    "errors",
    "arguments",
    "quantities",
    "config",
    "heads",
    "planning",
)
TABLE = "tools/lint/floors.py"


def floor_faults(path: str, source: str) -> list[Fault]:
    """Return the imports of `path` that go up or sideways."""
    if path == EXEMPT:
        return []
    own = top_name(path)
    if own not in NUMBERS:
        return [Fault(path, 1, f"{own} has no floor: add {own} to FLOORS in {TABLE}")]
    importable: tuple[str, ...] = SHARED
    if own in BOTTOM:
        importable = ()
    elif own == "errors":
        importable = BOTTOM
    faults = []
    for node, names in imported_names(path, parse(source)):
        for name in (name for name in names if name.split(".")[0] == "ithaca"):
            other = [*name.split("."), ""][1]
            if other in (own, "__version__") or other in importable:
                continue
            if other not in NUMBERS:
                message = f"imports {name} through the package: import from the file that defines the name"
                faults.append(Fault(path, node.lineno, message))
            elif NUMBERS[other] >= NUMBERS[own]:
                message = (
                    f"{own} (floor {NUMBERS[own]}) imports {name} (floor {NUMBERS[other]}): "
                    f"move the shared code below floor {NUMBERS[own]}, or pass it as an argument"
                )
                faults.append(Fault(path, node.lineno, message))
    return faults


def library_faults(path: str, source: str) -> list[Fault]:
    """Return the imports of transformers in the core outside models/, and of torch where `ithaca plan` would load it."""
    if path == EXEMPT:
        return []
    faults = []
    own = top_name(path)
    for node, names in imported_names(path, parse(source)):
        libraries = {name.split(".")[0] for name in names}
        if "transformers" in libraries and own != "models" and NUMBERS.get(own, 0) <= CORE:
            message = f"imports transformers, which models/ alone may do up to floor {CORE}: move the code to models/"
            faults.append(Fault(path, node.lineno, message))
        if "torch" in libraries and own in WITHOUT_TORCH:
            message = (
                f"imports torch, but {own} has to work without torch: move the code to a file that may import torch"
            )
            faults.append(Fault(path, node.lineno, message))
    return faults


def missing_floor_faults(sources: Mapping[str, str]) -> list[Fault]:
    """Return the names in FLOORS that no file or folder has."""
    present = {top_name(path) for path in sources}
    missing = [name for name in NUMBERS if name not in present]
    return [Fault(TABLE, 1, f"ithaca/ has no {name}: remove {name} from FLOORS") for name in missing]


def imported_names(path: str, tree: ast.Module) -> Iterator[tuple[ast.stmt, list[str]]]:
    """Yield every import with the dotted names that it may bring in; relative names are made absolute."""
    package = list(Path(path).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield node, [f"{base}.{alias.name}" for alias in node.names]
