"""A fault (file, line, what to do), and what every checker needs: the parsed source, the folder of a path."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """A broken rule at a line of a file."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def top_name(path: str) -> str:
    """Return the folder or file directly under ithaca/ that contains `path`: `memory`, `mesh`."""
    return Path(path).parts[1].removesuffix(".py")


@cache
def parse(source: str) -> ast.Module:
    """Return the syntax tree of `source`; the seven checkers of a file share one tree."""
    return ast.parse(source)
