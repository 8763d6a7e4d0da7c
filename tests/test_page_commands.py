"""Commands, settings and public names that the pages show exist; `tools/lint/pages.py` checks links and file names."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
import yaml
from pydantic import BaseModel

import ithaca
from ithaca.cli import app
from ithaca.config.schema import RunSettings, read_run
from tools.lint.tree import ROOT, read_pages

PAGES = read_pages()[0]
COMMAND: Any = typer.main.get_command(app)
VERBS: dict[str, Any] = COMMAND.commands
# Programs of the repository; a benchmark is looked up, not imported, because it may need packages of its own.
MODULES = re.compile(r"python -m ((?:benchmarks|tools|tests)[\w.]*)")


def missing_setting(path: str) -> bool:
    """True if a dotted key is not one of a run file."""
    kind: Any = RunSettings
    for part in (part for part in path.split(".") if not part.isdigit()):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(part)
            if field is None:
                return True
            kind = _section(field.annotation)
        else:
            return kind is not dict
    return False


def _section(annotation: Any) -> Any:
    """Return the section, the list's section or dict inside an annotation, None if the value is plain."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or annotation is dict):
        return annotation
    if str(annotation).startswith("dict["):
        return dict
    return next((found for inner in get_args(annotation) if (found := _section(inner))), None)


def dotted_settings(page: str) -> set[str]:
    """Return the settings that a page shows: `memory.host_budget`, `mesh.sp=4`, `memory.budget: 60GB`."""
    # In Python code `model` and `mesh` are objects: a setting of these sections is followed by its value.
    sections = "|".join(
        rf"{name}(?=[\w.]*[=:])" if name in ("model", "mesh") else name for name in RunSettings.model_fields
    )
    shown = re.findall(rf"(?<![\w./-])((?:{sections})(?:\.\w+)+)(?![\w/(.])", page)
    return {name for name in shown if not name.endswith((".py", ".json", ".md", ".png", ".jsonl", ".yaml"))}


@pytest.mark.parametrize("page", PAGES)
def test_commands_options_exist(page: str) -> None:
    joined = PAGES[page].replace("\\\n", " ")
    for verb, rest in re.findall(r"(?:^|`|\$ )ithaca ([a-z]+)\b([^`\n]*)", joined, re.M):
        assert verb in VERBS, f"{page}: no verb {verb}"
        known = {name for parameter in VERBS[verb].params for name in (*parameter.opts, *parameter.secondary_opts)}
        options = set(re.findall(r"(?<=\s)(--[a-z-]+)", rest.split("#")[0]))
        assert options <= known | {"--help"}, f"{page}: ithaca {verb} has no {sorted(options - known)}"


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page: str) -> None:
    assert [name for name in sorted(dotted_settings(PAGES[page])) if missing_setting(name)] == []


def test_settings_missing_key_found() -> None:
    assert missing_setting("memory.host_buget")
    assert missing_setting("stages.0.lenght")
    assert not missing_setting("stages.0.rope.factor")
    assert not missing_setting("model.config.attn_pdrop")
    shown = "`memory.budget: 60GB` memory/tiles.py `mesh.dp` mesh.sp=4"
    assert dotted_settings(shown) == {"memory.budget", "mesh.sp"}


def test_run_file_of_the_train_page_loads() -> None:
    [text] = re.findall(r"^```yaml\n(.+?)```", PAGES["docs/train.md"], re.M | re.S)
    run = read_run(yaml.safe_load(text))
    assert len(run.stages) == 2


@pytest.mark.parametrize("page", PAGES)
def test_public_names_exist(page: str) -> None:
    names = set(re.findall(r"(?<![\w./-])ithaca\.([A-Za-z_]+)", PAGES[page]))
    modules = {path.stem for path in Path(ithaca.__file__).parent.iterdir()}
    assert names <= set(dir(ithaca)) | modules


@pytest.mark.parametrize("page", PAGES)
def test_modules_and_make_targets_exist(page: str) -> None:
    for module in MODULES.findall(PAGES[page]):
        assert importlib.util.find_spec(module), f"{page}: python -m {module}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", PAGES[page], re.M)) <= {
        pair for target in targets for pair in ((target, ""), ("", target))
    }
