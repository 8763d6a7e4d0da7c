"""The rules of the house, checked on the source itself: who may import whom, and what no file may do.

Invariant kept: a file of `ithaca` imports only from folders of a smaller number, so that each folder can be
read with nothing in mind but the ones below it. The checkers are functions of (path, source), and each is
shown to catch a planted fault before it is trusted with the real files.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOUSE = (
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
NUMBERS = {name: number for number, names in enumerate(HOUSE) for name in names}
# Importable from everywhere, from the files beside them too.
SHARED = HOUSE[0]
# Shared too, and importing nothing themselves.
BOTTOM = ("exit_codes", "constants")
# `ithaca/__init__.py` re-exports from all over, lazily.
EXEMPT = "ithaca/__init__.py"
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
READS_ENVIRONMENT = ("mesh", "launch", "cli")
LONGEST = 400

FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "ithaca").rglob("*.py"))


def unit(path: str) -> str:
    """The folder or file directly under ithaca/ that `path` belongs to."""
    return Path(path).parts[1].removesuffix(".py")


def imports(path: str, tree: ast.Module) -> Iterator[tuple[ast.stmt, list[str]]]:
    """Every import with the dotted names it may bring in; relative ones are made absolute."""
    package = list(Path(path).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield node, [f"{base}.{alias.name}" for alias in node.names]


def layering_faults(path: str, source: str) -> list[str]:
    """Imports of `path` that go up or sideways in the house."""
    faults = []
    own = unit(path)
    if own not in NUMBERS:
        return [f"{path}: {own} has no number in the house"]
    for node, names in imports(path, ast.parse(source)):
        for name in (name for name in names if name.split(".")[0] == "ithaca"):
            other = [*name.split("."), ""][1]
            shared = other in (BOTTOM if own == "errors" else () if own in BOTTOM else SHARED)
            if other == own or shared or other == "__version__":
                continue
            if other not in NUMBERS:
                faults.append(f"{path}:{node.lineno}: imports {name} by way of the package itself")
            elif NUMBERS[other] >= NUMBERS[own]:
                faults.append(f"{path}:{node.lineno}: {own} ({NUMBERS[own]}) imports {name} ({NUMBERS[other]})")
    return faults


def library_faults(path: str, source: str) -> list[str]:
    """Imports of transformers in the core outside models/, and of torch where there shall be none."""
    faults = []
    own = unit(path)
    tree = ast.parse(source)
    for node, names in imports(path, tree):
        libraries = {name.split(".")[0] for name in names}
        allowed = own == "models" or NUMBERS.get(own, 0) > CORE
        if "transformers" in libraries and not allowed:
            faults.append(f"{path}:{node.lineno}: transformers belongs to models/")
        if "torch" in libraries and own in WITHOUT_TORCH:
            faults.append(f"{path}:{node.lineno}: {own} works without torch")
    return faults


def habit_faults(path: str, source: str) -> list[str]:
    """What no file may do, whatever its folder."""
    faults = []
    tree = ast.parse(source)
    if not ast.get_docstring(tree):
        faults.append(f"{path}:1: a module opens by saying what it is")
    if (lines := len(source.splitlines())) > LONGEST:
        faults.append(f"{path}: {lines} lines, at most {LONGEST}")
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Global):
            faults.append(f"{path}:{line}: global {', '.join(node.names)}")
        if reads_environment(node) and unit(path) not in READS_ENVIRONMENT:
            faults.append(f"{path}:{line}: the environment is read in mesh.py only")
    return faults


def reads_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv"}
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    )


@pytest.mark.parametrize("path", FILES)
def test_file_keeps_to_the_house(path: str) -> None:
    source = (ROOT / path).read_text()
    faults = habit_faults(path, source)
    if path != EXEMPT:
        faults += layering_faults(path, source) + library_faults(path, source)
    assert not faults, "\n".join(faults)


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
def test_import_upward_is_reported(path: str, source: str) -> None:
    assert len(layering_faults(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ithaca/attention/ring.py", "from ithaca.sequence.layout import SequenceLayout"),
        ("ithaca/attention/ring.py", "from ithaca.attention.kernels import choose"),
        ("ithaca/attention/ring.py", "from . import kernels\nfrom .kernels import choose\nfrom ..mesh import Mesh"),
        ("ithaca/errors.py", "from ithaca.exit_codes import MISTAKE"),
        ("ithaca/config/schema.py", "from ithaca.errors import IthacaError\nfrom ithaca import errors"),
        ("ithaca/cli/train.py", "from ithaca import __version__, training, verify\nimport ithaca_other"),
    ],
)
def test_import_downward_is_not_reported(path: str, source: str) -> None:
    assert layering_faults(path, source) == []


def test_library_on_the_wrong_floor_is_reported() -> None:
    late = "def load():\n    import transformers"
    assert library_faults("ithaca/memory/head_loss.py", late)
    assert library_faults("ithaca/state/weights/placement.py", "from transformers.modeling_utils import load")
    assert library_faults("ithaca/parallelize.py", "import transformers as tf")
    assert library_faults("ithaca/planning/search.py", "import torch.nn")
    assert library_faults("ithaca/state/weights/placement.py", late)
    assert not library_faults("ithaca/models/rope.py", "import transformers, torch")
    assert not library_faults("ithaca/training/trainer.py", "import transformers")


def test_habit_that_no_file_may_have_is_reported() -> None:
    assert habit_faults("ithaca/memory/head_loss.py", '"""Loss."""\nx = 1') == []
    assert habit_faults("ithaca/mesh.py", '"""Mesh."""\nimport os\nos.environ["RANK"]') == []
    for fault in (
        "x = 1",
        '"""Loss."""\ndef f():\n    global x',
        '"""Loss."""\nimport os\nos.environ.get("X")',
        '"""Loss."""\nimport os\nos.getenv("X")',
        '"""Loss."""\nfrom os import environ',
        '"""Loss."""' + "\n" * LONGEST + "x = 1",
    ):
        assert len(habit_faults("ithaca/memory/head_loss.py", fault)) == 1, fault


def imported_by(*arguments: str) -> tuple[set[str], str]:
    """Return the modules that a fresh interpreter has imported when the command ends, and what the command printed."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert done.returncode == 0, done.stderr
    return {line.rpartition("|")[2].strip() for line in lines}, done.stdout


# Imports are what a start takes its time for. A count is the same on every machine, seconds are not.
@pytest.mark.parametrize(
    ("arguments", "said", "most"),
    [(("-c", "import ithaca"), "", 120), (("-m", "ithaca", "--help"), "Usage", 700)],
    ids=["import", "help"],
)
def test_start_imports_few_modules_and_no_torch(arguments: tuple[str, ...], said: str, most: int) -> None:
    modules, printed = imported_by(*arguments)
    assert said in printed
    assert modules & {"torch", "transformers", "numpy"} == set()
    assert "ithaca" in modules
    assert len(modules) < most
