"""Habits: no `global`, and the environment is read in three places only."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.lint.fault import Fault, parse, top_name

# Launch variables (RANK, MASTER_ADDR, SLURM_*) are read here; every other file takes a value as an argument.
READS_ENVIRONMENT = ("mesh", "launch", "cli")
ENVIRONMENT = ("environ", "environb", "getenv", "putenv")


def global_faults(path: str, source: str) -> list[Fault]:
    """Return the `global` statements."""
    return [
        Fault(path, node.lineno, f"global {', '.join(node.names)}: keep the state in an object that is passed on")
        for node in ast.walk(parse(source))
        if isinstance(node, ast.Global)
    ]


def environment_faults(path: str, source: str) -> list[Fault]:
    """Return the reads of `os.environ` outside `READS_ENVIRONMENT`."""
    if top_name(path) in READS_ENVIRONMENT:
        return []
    places = ", ".join(f"{name}.py" if name == "mesh" else f"{name}/" for name in READS_ENVIRONMENT)
    message = f"reads the environment, which only {places} may do: take the value as an argument"
    return [Fault(path, line, message) for line in environment_reads(parse(source))]


def environment_reads(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that import or name `os.environ`, `os.getenv` or the like."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="os", names=names) if any(alias.name in ENVIRONMENT for alias in names):
                yield node.lineno
            case ast.Attribute(value=ast.Name(id="os"), attr=attribute) if attribute in ENVIRONMENT:
                yield node.lineno
