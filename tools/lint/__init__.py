"""Lints of our own: floors, sizes, names, first words of docstrings and habits that ruff does not check.

    python -m tools.lint                    # the whole tree; exit status 1 where there is a fault
    python -m tools.lint ithaca/memory      # the faults of one folder or file

Each fault is one line: `ithaca/memory/tiles.py:12: global CACHE: keep the state in an object that is passed on`. A checker
is a function of the path and source of one file, or of all paths and sources; `tools/lint/tree.py` lists the folders
that each checker looks at. `tests/tools/test_lint.py` plants faults for every checker.
"""
