"""The tree that is checked: which checker looks at which folders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from tools.lint.docstrings import docstring_faults
from tools.lint.fault import Fault
from tools.lint.floors import floor_faults, library_faults, missing_floor_faults
from tools.lint.habits import environment_faults, global_faults
from tools.lint.names import class_name_faults, file_name_faults
from tools.lint.pages import page_faults
from tools.lint.sizes import file_faults, folder_faults, function_faults

ROOT = Path(__file__).resolve().parent.parent.parent

FileChecker = Callable[[str, str], list[Fault]]
TreeChecker = Callable[[Mapping[str, str]], list[Fault]]
Checker = FileChecker | TreeChecker | Callable[[Mapping[str, str], Collection[str]], list[Fault]]

# The package has every rule. A benchmark is a program of its own: several may define a `Cell`, and all stand in one folder.
PACKAGE = ("ithaca",)
CODE = ("ithaca", "tools", "benchmarks")
PAGES = ("README.md", "docs/")
# Folders whose files a page may name.
NAMED = (*CODE, "docs", "examples", "tests")
FILE_CHECKERS: dict[FileChecker, tuple[str, ...]] = {
    floor_faults: PACKAGE,
    library_faults: PACKAGE,
    environment_faults: PACKAGE,
    global_faults: CODE,
    docstring_faults: CODE,
    file_faults: CODE,
    function_faults: CODE,
}
TREE_CHECKERS: dict[TreeChecker, tuple[str, ...]] = {
    missing_floor_faults: PACKAGE,
    class_name_faults: PACKAGE,
    file_name_faults: PACKAGE,
    folder_faults: ("ithaca", "tools"),
}


def read_sources(folders: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """Return the source of every Python file under `folders`, by its path below `root`."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def read_pages(root: Path = ROOT) -> tuple[dict[str, str], set[str]]:
    """Return the text of README.md and of docs/ by path, and the names of all files that a page may name."""
    paths = [path for path in root.glob("*") if path.is_file()]
    paths += [path for folder in NAMED for path in (root / folder).rglob("*") if path.is_file()]
    files = {path.relative_to(root).as_posix(): path for path in paths if "__pycache__" not in path.parts}
    pages = {name: path for name, path in files.items() if name.endswith(".md") and name.startswith(PAGES)}
    return {name: path.read_text(encoding="utf-8") for name, path in sorted(pages.items())}, set(files)


def tree_faults(root: Path = ROOT, checkers: Collection[Checker] | None = None) -> list[Fault]:
    """Return the faults that `checkers` find (None: every checker), sorted by file and line."""
    faults: list[Fault] = []
    for check_file, folders in FILE_CHECKERS.items():
        if checkers is None or check_file in checkers:
            for path, source in read_sources(folders, root).items():
                faults += check_file(path, source)
    for check_tree, folders in TREE_CHECKERS.items():
        if checkers is None or check_tree in checkers:
            faults += check_tree(read_sources(folders, root))
    if checkers is None or page_faults in checkers:
        faults += page_faults(*read_pages(root))
    return sorted(faults)
