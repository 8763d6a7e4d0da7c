"""Docstrings: every module has one, and the first line begins with a verb or a noun.

"Return the head ranges of every rank." reads at first sight; "Which heads every rank has." and "Of a rank, its heads."
have to be turned round in the reader's head.
"""

from __future__ import annotations

import ast
import re

from tools.lint.fault import Fault, parse

QUESTIONS = ("what", "whether", "how", "where", "which", "who", "whose", "why", "when")
FORBIDDEN_FIRST_WORDS = (*QUESTIONS, "of", "those", "as", "by", "for", "some")


def docstring_faults(path: str, source: str) -> list[Fault]:
    """Return a missing module docstring and the docstrings that begin with one of `FORBIDDEN_FIRST_WORDS`."""
    tree = parse(source)
    faults = []
    if not ast.get_docstring(tree):
        faults.append(Fault(path, 1, "the module has no docstring: say in one line what the file is"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = re.match(r"\W*(\w+)", ast.get_docstring(node) or "")
            if first and first[1].lower() in FORBIDDEN_FIRST_WORDS:
                message = (
                    f'the docstring begins with "{first[1]}": begin with a verb or a noun ("Return ...", "True if ...")'
                )
                faults.append(Fault(path, node.body[0].lineno, message))
    return faults
