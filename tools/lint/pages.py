"""Pages: every link of README.md and docs/ leads somewhere, and every source file and folder that a page names exists.

A name is a code span such as `memory/tiles.py` or `state/weights/`, below the repository or below ithaca/; a file name
alone may stand anywhere. The drawing of the floors in docs/design.md has to name every file and folder on a floor.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from tools.lint.fault import Fault
from tools.lint.floors import FLOORS, TABLE

DRAWING = "docs/design.md"
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"`([\w/]+\.py)`")
_FOLDER = re.compile(r"`(\w+/(?:\w+/)*)`")


def page_faults(pages: Mapping[str, str], files: Collection[str]) -> list[Fault]:
    """Return the wrong links and names of `pages` (text by path); `files` are all files of the repository."""
    faults = [fault for path, page in pages.items() for fault in name_faults(path, page, files)]
    faults += [fault for path, page in pages.items() for fault in _link_faults(path, page, pages, files)]
    return faults + (drawing_faults(pages[DRAWING]) if DRAWING in pages else [])


def _link_faults(path: str, page: str, pages: Mapping[str, str], files: Collection[str]) -> Iterator[Fault]:
    for line, text in _prose(page):
        for target in _LINK.findall(text):
            file, _, heading = target.partition("#")
            linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), file)) if file else path
            if "://" in target:
                continue
            if not _exists(linked, files):
                yield Fault(path, line, f"links to {target}, which does not exist: correct the link")
            elif heading and heading not in headings(pages.get(linked, "")):
                yield Fault(path, line, f"links to {target}, but {linked} has no such heading: correct the link")


def name_faults(path: str, page: str, files: Collection[str]) -> list[Fault]:
    """Return the source files and folders that a page names and that are not among `files`."""
    tops = {PurePosixPath(name).parts[0] for name in files if "/" in name}
    tops |= {PurePosixPath(name).parts[1] for name in files if name.startswith("ithaca/")}
    file_names = {PurePosixPath(name).name for name in files}
    faults = []
    for line, text in _prose(page):
        names = [match[1] for match in _FILE.finditer(text)]
        names += [match[1] for match in _FOLDER.finditer(text) if match[1].split("/")[0] in tops]
        for name in names:
            alone = "/" not in name and name in file_names
            if not alone and not any(_exists(start + name, files) for start in ("", "ithaca/")):
                faults.append(Fault(path, line, f"names {name}, which does not exist: correct the name"))
    return faults


def drawing_faults(page: str) -> list[Fault]:
    """Return the files and folders on a floor that the drawing in `DRAWING` leaves out."""
    prose = {number for number, _ in _prose(page)}
    blocks = "\n".join(text for number, text in enumerate(page.splitlines(), 1) if number not in prose)
    drawn = set(re.findall(r"(\w+)(?:/|\.py)", blocks))
    missing = [name for names in FLOORS for name in names if name not in drawn and name != "__main__"]
    return [
        Fault(DRAWING, 1, f"the drawing lacks {name}, which has a floor in {TABLE}: add a line") for name in missing
    ]


def headings(page: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = (text.lstrip("#").strip().lower() for _, text in _prose(page) if re.match(r"#+ ", text))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def _prose(page: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside its code blocks, with their numbers."""
    code = False
    for number, text in enumerate(page.splitlines(), 1):
        if text.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, text


def _exists(name: str, files: Collection[str]) -> bool:
    folder = name.rstrip("/") + "/"
    return name in files or any(file.startswith(folder) for file in files)
