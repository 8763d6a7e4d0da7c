"""The lints of `tools/lint` report planted faults, and nothing where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.lint.__main__ import main
from tools.lint.docstrings import docstring_faults
from tools.lint.fault import Fault
from tools.lint.floors import FLOORS, TABLE, floor_faults, library_faults, missing_floor_faults
from tools.lint.habits import environment_faults, global_faults
from tools.lint.names import class_name_faults, file_name_faults
from tools.lint.pages import page_faults
from tools.lint.sizes import FILE_LINES, FOLDER_FILES, FUNCTION_LINES, file_faults, folder_faults, function_faults
from tools.lint.tree import FILE_CHECKERS, TREE_CHECKERS, tree_faults

FILE = "ithaca/memory/tiles.py"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ithaca/attention/ring.py", "from ithaca.models.rope import rotate"),
        ("ithaca/attention/ring.py", "from ithaca.memory import tiles"),
        ("ithaca/attention/ring.py", "from ithaca import parallelize"),
        ("ithaca/attention/ring.py", "from ithaca import init_mesh"),
        ("ithaca/attention/ring.py", "import ithaca"),
        ("ithaca/attention/ring.py", "import ithaca.loss.causal"),
        ("ithaca/attention/ring.py", "from ..memory.tiles import tile"),
        ("ithaca/attention/kernels/cpu.py", "from ... import training"),
        ("ithaca/sequence/layout.py", "def late():\n    from ithaca.planning import terms"),
        ("ithaca/parallelize.py", "from .cli import main"),
        ("ithaca/mesh.py", "from ithaca.planning.plan import Job"),
        ("ithaca/errors.py", "from ithaca.mesh import Mesh"),
        ("ithaca/constants.py", "from ithaca.errors import IthacaError"),
        ("ithaca/utils/misc.py", ""),
    ],
)
def test_floor_faults_wrong_import_reported(path: str, source: str) -> None:
    assert len(floor_faults(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ithaca/attention/ring.py", "from ithaca.sequence.layout import SequenceLayout"),
        ("ithaca/attention/ring.py", "from ithaca.attention.kernels import choose"),
        ("ithaca/attention/ring.py", "from . import kernels\nfrom .kernels import choose\nfrom ..mesh import Mesh"),
        ("ithaca/errors.py", "from ithaca.exit_codes import MISTAKE"),
        ("ithaca/config/schema.py", "from ithaca.errors import IthacaError\nfrom ithaca import errors"),
        ("ithaca/cli/train.py", "from ithaca import __version__, training, verify\nimport ithaca_other"),
        ("ithaca/__init__.py", "from ithaca.cli import main"),
    ],
)
def test_floor_faults_right_import_accepted(path: str, source: str) -> None:
    assert floor_faults(path, source) == []


def test_missing_floor_faults_renamed_folder_reported() -> None:
    present = {f"ithaca/{name}.py": "" for names in FLOORS for name in names}
    assert missing_floor_faults(present) == []
    del present["ithaca/mesh.py"]
    [fault] = missing_floor_faults({**present, "ithaca/meshes.py": ""})
    assert fault.path == TABLE
    assert "mesh" in fault.message


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ithaca/memory/head_loss.py", "def load():\n    import transformers"),
        ("ithaca/state/weights/placement.py", "from transformers.modeling_utils import load"),
        ("ithaca/parallelize.py", "import transformers as tf"),
        ("ithaca/planning/search.py", "import torch.nn"),
    ],
)
def test_library_faults_wrong_library_reported(path: str, source: str) -> None:
    assert len(library_faults(path, source)) == 1


def test_library_faults_right_library_accepted() -> None:
    assert library_faults("ithaca/models/rope.py", "import transformers, torch") == []
    assert library_faults("ithaca/training/trainer.py", "import transformers") == []


@pytest.mark.parametrize(
    "source",
    ['import os\nos.environ.get("X")', 'import os\nos.getenv("X")', "from os import environ"],
)
def test_environment_faults_read_outside_launch_reported(source: str) -> None:
    assert len(environment_faults(FILE, source)) == 1
    assert environment_faults("ithaca/launch/slurm.py", source) == []
    assert environment_faults("ithaca/mesh.py", source) == []


def test_global_faults_global_statement_reported() -> None:
    [fault] = global_faults(FILE, "def f():\n    global x, y")
    assert str(fault).startswith(f"{FILE}:2: global x, y")
    assert global_faults(FILE, "x = 1  # global") == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""What the tiles are."""', 1),
        ('"""Tiles."""\n\nclass Tile:\n    """Of a shard, one part."""', 4),
        ('"""Tiles."""\n\ndef tile():\n    """\n    whether there is one.\n    """', 4),
        ('"""Tiles."""\nclass Tile:\n    async def cut(self):\n        """`How` many."""', 4),
        ("x = 1", 1),
    ],
)
def test_docstring_faults_forbidden_first_word_reported(source: str, line: int) -> None:
    [fault] = docstring_faults(FILE, source)
    assert (fault.path, fault.line) == (FILE, line)


def test_docstring_faults_verb_or_noun_accepted() -> None:
    source = '"""Tiles.\n\nWhat follows is free.\n"""\ndef tile():\n    """Return the forest."""\ndef bare(): ...'
    assert docstring_faults(FILE, source) == []


def test_file_faults_long_file_reported() -> None:
    assert len(file_faults(FILE, "x = 1\n" * (FILE_LINES + 1))) == 1
    assert file_faults(FILE, "x = 1\n" * FILE_LINES) == []


def test_function_faults_long_method_reported() -> None:
    def source(lines: int) -> str:
        return "class A:\n    def f(self):\n" + "        x = 1\n" * (lines - 1)

    [fault] = function_faults(FILE, source(FUNCTION_LINES + 1))
    assert fault.line == 2
    assert function_faults(FILE, source(FUNCTION_LINES)) == []


def test_folder_faults_full_folder_reported() -> None:
    files = {f"ithaca/memory/file_{number}.py": "" for number in range(FOLDER_FILES)}
    assert folder_faults({**files, "ithaca/memory/inner/deeper.py": ""}) == []
    [fault] = folder_faults({**files, "ithaca/memory/__init__.py": ""})
    assert fault.path == "ithaca/memory"


def test_class_name_faults_same_class_twice_reported() -> None:
    sources = {
        "ithaca/a.py": "class Job: ...",
        "ithaca/b/c.py": "def f():\n    class Job: ...",
        "ithaca/d.py": "Job = 1",
    }
    faults = class_name_faults(sources)
    assert [(fault.path, fault.line) for fault in faults] == [("ithaca/a.py", 1), ("ithaca/b/c.py", 2)]
    assert "ithaca/b/c.py:2" in faults[0].message


def test_file_name_faults_same_file_twice_reported() -> None:
    allowed = {"ithaca/__init__.py": "", "ithaca/cli/__init__.py": "", "ithaca/cli/plan.py": ""}
    assert file_name_faults(allowed) == []
    faults = file_name_faults({**allowed, "ithaca/planning/plan.py": ""})
    assert [fault.path for fault in faults] == ["ithaca/cli/plan.py", "ithaca/planning/plan.py"]


PAGES = {
    "README.md": "# Top\n[a](docs/design.md#the-way-in) `memory/tiles.py` `ithaca/memory/` `tiles.py` `books/`",
    "docs/design.md": "## The `way` in!\n```\n[no](link.md) `no.py`\n```\n[top](../README.md) [web](https://x.org)",
}
FILES = {*PAGES, "ithaca/memory/tiles.py", "docs/step.png"}


@pytest.mark.parametrize(
    "fault",
    [
        "[a](docs/gone.md)",
        "![a](docs/gone.png)",
        "[a](docs/design.md#gone)",
        "[a](#gone)",
        "`memory/gone.py`",
        "`gone.py`",
        "`memory/gone/`",
    ],
)
def test_page_faults_wrong_link_or_name_reported(fault: str) -> None:
    pages = {"README.md": PAGES["README.md"] + f"\n{fault}", "docs/other.md": "## Other"}
    right = page_faults(pages | {"docs/design.md": PAGES["docs/design.md"] + _drawing()}, FILES)
    assert [(found.path, found.line) for found in right] == [("README.md", 3)]


def test_page_faults_right_pages_accepted() -> None:
    assert page_faults({**PAGES, "docs/design.md": PAGES["docs/design.md"] + _drawing()}, FILES) == []


def test_page_faults_floor_missing_in_drawing_reported() -> None:
    drawn = PAGES["docs/design.md"] + _drawing().replace("mesh.py", "")
    [fault] = page_faults({**PAGES, "docs/design.md": drawn}, FILES)
    assert "mesh" in fault.message


def _drawing() -> str:
    return "\n```\n" + "\n".join(f"{name}.py" for names in FLOORS for name in names) + "\n```\n"


def test_tree_faults_planted_tree_reports_every_checker(tmp_path: Path) -> None:
    folder = tmp_path / "ithaca/memory"
    (folder / "inner").mkdir(parents=True)
    body = '"""How."""\nimport os, transformers, ithaca.cli\nclass A:\n    def f(self):\n        global x\n        os.environ\n'
    (folder / "tiles.py").write_text(body + "        x = 1\n" * FILE_LINES)
    (folder / "inner/tiles.py").write_text('"""Tiles."""\nclass A: ...\n')
    for number in range(FOLDER_FILES):
        (folder / f"file_{number}.py").write_text('"""Tiles."""\n')
    (tmp_path / "README.md").write_text("[gone](gone.md)")
    # Two faults each for the names that stand twice, one for every other checker, one for each floor without a file.
    floors = sum(map(len, FLOORS)) - 1
    assert len(tree_faults(tmp_path)) == len(FILE_CHECKERS) + len(TREE_CHECKERS) + 2 + floors - 1 + 1


def test_main_prints_one_line_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    faults = [Fault("ithaca/memory/tiles.py", 3, "split"), Fault("ithaca/mesh.py", 1, "rename")]
    monkeypatch.setattr("tools.lint.__main__.tree_faults", lambda: faults)
    assert main([]) == 1
    assert capsys.readouterr().out == "ithaca/memory/tiles.py:3: split\nithaca/mesh.py:1: rename\n"
    assert main(["ithaca/memory/"]) == 1
    assert capsys.readouterr().out == "ithaca/memory/tiles.py:3: split\n"
    assert main(["ithaca/mem"]) == 0
