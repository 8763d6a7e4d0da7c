"""Tests of `ithaca prepare`: tables, coloured samples, and mistakes in one line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ithaca.cli import app
from ithaca.cli.prepare import coloured
from ithaca.data.rows.feed import open_feed
from ithaca.errors import DataError
from tests.data.corpus import TOKENIZER, prepared, write_documents, write_lines

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def call(*words: str) -> str:
    done = CliRunner().invoke(app, ["prepare", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_prepare_prints_tables_of_sources_and_stages(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 200)
    with file.open("a") as more:
        more.write("{broken\n")
    words = [
        f"data.sources={file}",
        f"output={tmp_path / 'run'}",
        "validation.share=0.1",
        "stages.0.length=512",
        "stages.1.length=8k",
    ]
    output = call(*words)
    row = next(line for line in output.splitlines() if line.startswith(str(file)))
    assert row.split()[1:3] == ["text", "200"]
    assert row.split()[-1] == "1"
    assert f"left out: {file}:201: not JSON" in output
    stages = [line.split() for line in output.splitlines() if line.split()[1:2] in (["512"], ["8,192"])]
    assert len(stages) == 2
    assert all(stage[3].endswith("%") for stage in stages)
    # The cache is where `ithaca train` looks for it.
    assert list((tmp_path / "run" / "data").glob("*/about.json"))
    assert call(*words) == output


def test_narrow_page_cuts_no_number_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    file = write_documents(tmp_path / "a rather long name of documents.jsonl", 200)
    output = call(f"data.sources={file}", f"output={tmp_path / 'run'}")
    assert str(file) in output
    assert "\u2026" not in output
    assert {"documents", "rows an epoch"} <= {part.strip() for line in output.splitlines() for part in line.split("  ")}


def test_validation_without_documents_is_refused(tmp_path: Path) -> None:
    """The run would refuse it after its ranks have started."""
    file = write_documents(tmp_path / "docs.jsonl", 1)
    words = [f"data.sources={file}", f"output={tmp_path / 'run'}", "validation.share=0.01"]
    with pytest.raises(DataError, match="validation"):
        CliRunner().invoke(app, ["prepare", *words], catch_exceptions=False)


def test_show_prints_sample_rows(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": CHAT}] * 3)
    output = call(f"data.sources={file}", f"output={tmp_path / 'run'}", "--show", "1")
    assert f"row 0: {file}:" in output
    assert output.count("<|user|>hi<|end|><|assistant|>yo<|end|>") == 3


def test_learned_tokens_alone_are_green(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": CHAT}])
    row = open_feed(prepared(tmp_path, file), length=32, rows="packed", seed=0).row(0)
    text = coloured(row, TOKENIZER, 1000)
    green = [text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style)]
    assert "".join(green) == "yo<|end|>"
    specials = [text.plain[span.start : span.end] for span in text.spans if "magenta" in str(span.style)]
    assert "".join(specials) == "<|begin|><|user|><|end|><|assistant|><|end|>"
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, color_system="standard").print(text)
    assert "\x1b[32myo" in shown.getvalue()
    # A mask moved by one token is shown as such.
    moved = coloured({**row, "labels": row["labels"].roll(1)}, TOKENIZER, 1000)
    assert moved.spans != text.spans


def test_stream_is_shown_without_counts(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)
    output = call(f"data.sources={file}", f"output={tmp_path / 'run'}", "data.streaming=true", "--show", "1")
    assert "streamed" in output
    assert "document 1" in output


def test_mistake_in_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no file or folder"):
        call(f"data.sources={tmp_path}/none.jsonl", f"output={tmp_path / 'run'}")


def test_cache_inside_the_documents_is_refused(typed: Any, own_folder: None, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text")
    for word in ("output=texts", "data.cache=texts/cache"):
        status, _, err = typed("prepare", "data.sources=texts", word)
        assert status == 2
        assert f"{word} puts files of the run" in err
        assert not list((tmp_path / "texts").glob("*/"))
