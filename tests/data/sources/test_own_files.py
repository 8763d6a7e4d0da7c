"""Tests of runs that would read their own files: refused by resolved paths, with another folder named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ithaca.config.schema import read_run
from ithaca.data.sources.own_files import refuse_own_files
from ithaca.errors import DataError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Texts, rows, a repository of sources, and a link to the texts."""
    for file in ("txt/a.txt", "txt/deep/b.txt", "rows/a.jsonl", "code/.git/x", "code/a.py", "data/c.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text('{"text": "x"}\n')
    (tmp_path / "link").symlink_to(tmp_path / "txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(output: str, *sources: Any, cache: str | None = None, held: Any = None) -> Any:
    return read_run(
        {
            "output": output,
            "data": {"sources": list(sources), "cache": cache},
            "validation": {"sources": [held] if held else []},
        }
    )


@pytest.mark.parametrize(
    ("output", "sources", "more"),
    [
        ("txt", ["txt"], {}),
        ("./txt/../txt/", ["txt"], {}),
        ("txt/run", ["txt"], {}),
        ("txt", ["link"], {}),
        ("link/run", ["txt"], {}),
        ("runs/x", ["."], {}),
        ("rows", ["rows/*.jsonl"], {}),
        ("rows/x", ["rows/**/*.jsonl"], {}),
        ("rows", ["rows/metrics.jsonl"], {}),
        (".", ["data"], {}),
        ("code/run", ["code"], {}),
        ("run", ["txt"], {"cache": "txt/cache"}),
        ("rows", ["txt"], {"held": "rows"}),
        ("rows/x", [{"path": "rows", "format": "jsonl"}], {}),
    ],
)
def test_run_that_reads_its_own_files_is_refused(
    here: Path, output: str, sources: list[Any], more: dict[str, Any]
) -> None:
    """The setting that the message proposes is accepted."""
    if output == "rows" and sources == ["rows/metrics.jsonl"]:
        (here / sources[0]).write_text('{"text": "mine"}\n')
    with pytest.raises(DataError, match="next start would take them for documents") as refusal:
        refuse_own_files(given(output, *sources, **more))
    setting, value = re.search(r"type (output|data\.cache)=([^,]+),", str(refusal.value)).groups()  # type: ignore[union-attr]
    assert not Path(value).is_absolute()
    output, more = (value, more) if setting == "output" else (output, {**more, "cache": value})
    refuse_own_files(given(output, *sources, **more))


@pytest.mark.parametrize(
    ("output", "source"),
    [
        ("txt2", "txt"),
        ("txt/.run", "txt"),
        ("runs/x", {"path": ".", "include": ["*.txt"]}),
        ("rows/run", "rows/a*.jsonl"),
        ("rows/run", "rows/*.jsonl"),
        ("rows/run", {"path": "rows", "format": "parquet"}),
        ("code/build/run", "code"),
        (".", "txt"),
        ("run", "owner/name"),
        ("run", "stdlib"),
    ],
)
def test_run_whose_files_no_source_reads_is_accepted(here: Path, output: str, source: Any) -> None:
    refuse_own_files(given(output, source))
