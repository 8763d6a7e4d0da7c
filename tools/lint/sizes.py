"""Sizes: at most 14 Python files in a folder, 350 lines in a file, 70 lines in a function."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

from tools.lint.fault import Fault, parse

FOLDER_FILES = 14
FILE_LINES = 350
FUNCTION_LINES = 70


def folder_faults(sources: Mapping[str, str]) -> list[Fault]:
    """Return the folders with more than `FOLDER_FILES` Python files, `__init__.py` counted."""
    counts = Counter(str(PurePosixPath(path).parent) for path in sources)
    return [
        Fault(folder, 1, f"{count} Python files, at most {FOLDER_FILES}: merge small files or make a subfolder")
        for folder, count in counts.items()
        if count > FOLDER_FILES
    ]


def file_faults(path: str, source: str) -> list[Fault]:
    """Return a fault if the file has more than `FILE_LINES` lines."""
    lines = len(source.splitlines())
    if lines <= FILE_LINES:
        return []
    return [Fault(path, FILE_LINES + 1, f"{lines} lines, at most {FILE_LINES}: split the file by subject")]


def function_faults(path: str, source: str) -> list[Fault]:
    """Return the functions with more than `FUNCTION_LINES` lines from `def` to the last line."""
    faults = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                message = f"{node.name} has {lines} lines, at most {FUNCTION_LINES}: split the function"
                faults.append(Fault(path, node.lineno, message))
    return faults
