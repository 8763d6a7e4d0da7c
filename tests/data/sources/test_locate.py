"""Tests of sources: the files of a path, the reading of each format, and refusals."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ithaca.config.schema import SourceSettings, ValidationSettings
from ithaca.data.rows.feed import open_feed
from ithaca.data.sources.locate import HUGE, FoundSource, locate
from ithaca.errors import DataError
from tests.data.corpus import epoch_of, prepared, source_texts, texts_of, touch, whole, write_documents, write_lines


def names(located: FoundSource, root: Path) -> list[str]:
    return [str(Path(file).relative_to(root)) for file in located.files]


def test_stdlib_gives_its_python_files() -> None:
    located = locate(SourceSettings(path="stdlib"))
    assert located.format == "code"
    assert len(located.files) > 300
    top = [file for file in located.files if Path(file).parent == Path(argparse.__file__).parent]
    assert top == sorted(top)
    kept = {Path(file).name for file in located.files}
    assert {"argparse.py", "decoder.py"} <= kept
    assert not any(part in ("test", "tests", "site-packages") for file in located.files for part in Path(file).parts)


def test_repository_gives_handwritten_files_alone(tmp_path: Path) -> None:
    touch(tmp_path, "src/b.py", "src/a.py", "README.md", "web/app.js")
    touch(
        tmp_path, ".git/config", ".hidden/x.py", "node_modules/p/i.js", "vendor/v.go", "web/app.min.js", "poetry.lock"
    )
    touch(tmp_path, "huge.py", content="x" * (HUGE + 1))
    touch(tmp_path, "empty.py", content="")
    touch(tmp_path, "blank.py", content="\n \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "link").symlink_to(tmp_path / "src")
    located = locate(SourceSettings(path=str(tmp_path)))
    assert located.format == "code"
    assert names(located, tmp_path) == ["README.md", "src/a.py", "src/b.py", "web/app.js"]
    only = locate(SourceSettings(path=str(tmp_path), include=["*.py"]))
    assert names(only, tmp_path) == ["src/a.py", "src/b.py"]


@pytest.mark.parametrize("streaming", [False, True])
def test_huge_files_of_a_repository_are_named_once(tmp_path: Path, streaming: bool) -> None:
    root = tmp_path / "repo"
    touch(root, "a.py", ".git/config")
    touch(root, "b.py", "c.py", "d.txt", "pnpm-lock.yaml", content="x" * (HUGE + 1))
    (root / "e.bin").write_bytes(b"\0" * (HUGE + 1))
    huge = prepared(tmp_path, SourceSettings(path=str(root), include=["*.py", "*.bin"]), streaming=streaming)
    line = (
        f"left out of {root} for being over 1 MiB: {root}/b.py and 1 more; to train on such files name them as sources of "
        "their own"
    )
    assert huge.left_out == (line, f"left out of {root}: 1 .bin (no text)")
    # The second time the documents are in the cache.
    assert (
        prepared(tmp_path, SourceSettings(path=str(root), include=["*.py", "*.bin"]), streaming=streaming).notes
        == huge.notes
    )
    assert prepared(tmp_path, SourceSettings(path=str(root / "b.py")), streaming=streaming).left_out == ()
    touch(root, "b.py", "c.py", "d.txt")
    assert prepared(tmp_path, SourceSettings(path=str(root), include=["*.py"]), streaming=streaming).left_out == ()


@pytest.mark.parametrize(("format", "suffix"), [("text", ".txt"), ("jsonl", ".jsonl"), ("parquet", ".parquet")])
@pytest.mark.parametrize("top", [True, False])
def test_data_folder_named_like_a_built_one_is_read(tmp_path: Path, format: str, suffix: str, top: bool) -> None:
    names_of = [f"{name}/a{suffix}" for name in ("build", "dist", "env", "out", "sub", "target", "vendor")]
    touch(tmp_path, *names_of, f".hidden/a{suffix}", *([f"a{suffix}"] if top else []))
    located = locate(SourceSettings(path=str(tmp_path)))
    assert located.format == format
    assert names(located, tmp_path) == [f"a{suffix}"] * top + names_of
    # In a repository they are what they are called.
    touch(tmp_path, ".git/config")
    assert names(locate(SourceSettings(path=str(tmp_path), format=format)), tmp_path) == [f"a{suffix}"] * top + [
        f"sub/a{suffix}"
    ]


@pytest.mark.parametrize("path", ["rows.csv", "rows.tsv.gz", "*.csv"])
def test_table_of_unread_kind_is_no_text(tmp_path: Path, path: str) -> None:
    touch(tmp_path, "rows.csv", "rows.tsv.gz")
    with pytest.raises(DataError, match="a table of a kind that is not read: write it as jsonl or parquet"):
        locate(SourceSettings(path=str(tmp_path / path)))
    assert locate(SourceSettings(path=str(tmp_path / path), format="text")).format == "text"


def test_built_files_do_not_change_the_format(tmp_path: Path) -> None:
    touch(tmp_path, "a.py", "b.py", "README.md", "build/c.jsonl", "build/d.parquet", "dist/e.txt")
    located = locate(SourceSettings(path=str(tmp_path)))
    assert (located.format, names(located, tmp_path)) == ("code", ["README.md", "a.py", "b.py"])
    touch(tmp_path / "docs", "a.md", "out/b.txt", *(f"out/{page}.html" for page in range(9)))
    located = locate(SourceSettings(path=str(tmp_path / "docs")))
    assert (located.format, names(located, tmp_path / "docs")) == ("text", ["a.md", "out/b.txt"])


def test_letter_cut_by_the_first_block_is_text(tmp_path: Path) -> None:
    touch(tmp_path, "a.py", content="a" * 8191 + "é" * 10)
    (tmp_path / "b.py").write_bytes(b"a" * 100 + b"\xe9" + b"a" * 9000)
    assert names(locate(SourceSettings(path=str(tmp_path), format="code")), tmp_path) == ["a.py"]


def test_folder_of_texts_gives_one_document_a_file(tmp_path: Path) -> None:
    touch(tmp_path / "docs", "b.txt", "sub/a.md", content="one\n\ntwo\n")
    touch(tmp_path / "docs", "settings.json", content="{}")
    located = locate(SourceSettings(path=str(tmp_path / "docs")))
    assert located.format == "text"
    assert names(located, tmp_path / "docs") == ["b.txt", "sub/a.md"]
    feed = open_feed(prepared(tmp_path, tmp_path / "docs"), length=64, rows="packed", seed=0)
    assert texts_of(epoch_of(feed)) == [whole("one\n\ntwo\n")] * 2


def test_folder_of_texts_and_code_gives_all_files(tmp_path: Path) -> None:
    """Whatever the suffix is, or none; what is left out is said by suffix, number and reason."""
    root = tmp_path / "docs"
    touch(root, *(f"{number}.txt" for number in range(30)), *(f"m{number}.md" for number in range(9)))
    touch(root, "a.py", "b.rs", "LICENSE", "c.unheard", "page.html", "sub/deep/d.f90")
    touch(root, "set.json", "set.yaml", "set.toml", "rows.csv", "rows.arrow", "pnpm-lock.yaml", "x.min.js", ".hidden")
    touch(root, "build/e.py", "build/f.txt", ".git_/g.txt")
    touch(root, "none.py", content="")
    touch(root, "huge.py", content="x" * (HUGE + 1))
    (root / "p.png").write_bytes(b"\x89PNG\0\0")
    (root / "q.png").write_bytes(b"\x89PNG\0\0")
    (root / "latin.py").write_bytes(b"caf\xe9")
    (root / "loop").symlink_to(root / "loop")
    (root / "around").symlink_to(root)
    located = locate(SourceSettings(path=str(root)))
    assert located.format == "text"
    expected = {*(f"{number}.txt" for number in range(30)), *(f"m{number}.md" for number in range(9)), "build/f.txt"}
    expected |= {"a.py", "b.rs", "LICENSE", "c.unheard", "page.html", "sub/deep/d.f90"}
    assert set(names(located, root)) == expected
    assert names(located, root) == names(locate(SourceSettings(path=str(root), format="text")), root)
    huge, others = located.notes
    assert huge.startswith(f"left out of {root} for being over 1 MiB: {root}/huge.py; to train")
    assert others.startswith(f"left out of {root}: 2 .png (no text), ")
    for part in (
        "1 .json (settings)",
        "2 .yaml (settings)",
        "1 .arrow (rows of data: name them as a source of their own)",
        "1 .py (vendored or built)",
        "1 .py (empty)",
        "1 .py (no UTF-8 text)",
        "1 folders (hidden)",
        "1 folders (links, not followed)",
        "1 files without a suffix (hidden)",
    ):
        assert part in located.others or "of other kinds" in others, part


@pytest.mark.parametrize("streaming", [False, True])
def test_skipped_files_are_reported_each_time(tmp_path: Path, streaming: bool) -> None:
    root = tmp_path / "docs"
    touch(root, "a.txt", "b.txt", "c.py", "d.json")
    for _ in range(2):
        found = prepared(tmp_path, root, streaming=streaming)
        assert found.left_out == (f"left out of {root}: 1 .json (settings)",)
    touch(root / "whole", "a.txt", "b.md")
    assert prepared(tmp_path, root / "whole", streaming=streaming).left_out == ()


def test_folder_of_rows_reports_skipped_files(tmp_path: Path) -> None:
    touch(tmp_path / "rows", "a.jsonl", "README.md", "b.csv", content='{"text": "x"}\n')
    left = "left out of {}: 1 .csv (not jsonl), 1 .md (not jsonl)"
    assert locate(SourceSettings(path=str(tmp_path / "rows"))).notes == (left.format(tmp_path / "rows"),)
    touch(tmp_path / "code", "a.py", "b.py", "node_modules/c.js", ".env")
    located = locate(SourceSettings(path=str(tmp_path / "code")))
    assert names(located, tmp_path / "code") == ["a.py", "b.py"]
    where = tmp_path / "code"
    assert located.notes == (f"left out of {where}: 1 files without a suffix (hidden), 1 folders (vendored or built)",)
    # Who names the files to include knows of the others.
    assert locate(SourceSettings(path=str(tmp_path / "code"), include=["a.py"])).notes == ()
    assert locate(SourceSettings(path="stdlib")).notes == ()


@pytest.mark.parametrize("suffix", [".csv", ".arrow", ".tsv"])
def test_folder_of_unread_tables_is_refused(tmp_path: Path, suffix: str) -> None:
    touch(tmp_path, f"a{suffix}", f"b{suffix}", "dataset_info.json", "state.json")
    with pytest.raises(DataError, match="holds tables of a kind that is not read"):
        locate(SourceSettings(path=str(tmp_path)))


def test_glob_and_folder_of_jsonl_are_sorted(tmp_path: Path) -> None:
    for part in (2, 0, 1):
        write_lines(tmp_path / "parts" / f"{part}.jsonl", [{"text": str(part)}])
    for path in (tmp_path / "parts", tmp_path / "parts" / "*.jsonl"):
        located = locate(SourceSettings(path=str(path)))
        assert located.format == "jsonl"
        assert source_texts(located) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("path", "settings", "match"),
    [
        ("missing.jsonl", {}, "is no file or folder here"),
        ("./missing", {}, "is no file or folder here"),
        ("*.jsonl", {}, "no file matches"),
        ("docs", {"include": ["*.rs"]}, r"has no text files .*include=\['\*\.rs'\]"),
        ("docs", {"format": "parquet"}, "has no parquet files"),
        ("mixed", {}, r"holds jsonl and parquet files: set data\.sources\.0\.format"),
        ("mixed/*", {}, r"several formats \(jsonl, parquet\)"),
        ("empty", {}, "has no text files"),
    ],
)
def test_missing_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, settings: dict[str, object], match: str
) -> None:
    touch(tmp_path, "docs/a.txt", "mixed/a.jsonl", "mixed/b.parquet")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=match):
        locate(SourceSettings(path=path, **settings))


def test_fingerprint_follows_content_and_settings(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 3)
    first = locate(SourceSettings(path=str(file))).fingerprint()
    assert locate(SourceSettings(path=str(file))).fingerprint() == first
    assert locate(SourceSettings(path=str(file), column="text")).fingerprint() != first
    write_documents(file, 4)
    assert locate(SourceSettings(path=str(file))).fingerprint() != first


@pytest.mark.parametrize(
    ("files", "settings", "read", "beside"),
    [
        ("1.txt 2.txt 3.txt a.jsonl", {}, "a.jsonl", ".txt (not jsonl)"),
        ("1.txt a.ndjson b.json", {}, "a.ndjson", ".json (beside .jsonl and .ndjson)"),
        ("1.txt a.jsonl b.json", {"include": ["*.txt"]}, "1.txt", ""),
        ("a.jsonl b.json", {"include": ["*.json*"]}, "a.jsonl b.json", ""),
        ("a.jsonl b.txt", {"include": ["*"]}, "a.jsonl", ".txt (not jsonl)"),
        ("a.json b.json", {}, "a.json b.json", ""),
        ("1.txt 2.txt b.json c.yaml", {}, "1.txt 2.txt", ".json (settings)"),
    ],
)
def test_folder_of_rows_and_texts_gives_rows(
    tmp_path: Path, files: str, settings: dict[str, object], read: str, beside: str
) -> None:
    touch(tmp_path, *files.split())
    located = locate(SourceSettings(path=str(tmp_path), **settings))
    assert names(located, tmp_path) == read.split()
    assert beside in " ".join(located.notes)


def test_source_without_documents_names_file_and_words(tmp_path: Path) -> None:
    touch(tmp_path, "mixed/1.txt", "mixed/2.txt")
    write_lines(tmp_path / "mixed" / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    with pytest.raises(DataError) as refusal:
        prepared(tmp_path, tmp_path / "mixed")
    assert str(refusal.value).startswith(f"{tmp_path}/mixed/metrics.jsonl: no column holds text")
    assert """such as 'data.sources.0.include=["*.txt"]'""" in str(refusal.value)
    touch(tmp_path, "odd/settings.json", content='{"a": {"b": 1}}')
    write_lines(tmp_path / "odd" / "part-1.json", [{"text": "x"}])
    with pytest.raises(
        DataError, match=r"odd/settings\.json:1: .*choose the files .* '.*include=\[\"part-\*\.json\"\]'"
    ):
        prepared(tmp_path, tmp_path / "odd")


def test_source_in_messages_is_named_as_typed(tmp_path: Path) -> None:
    said = []
    for sources in (["no.jsonl"], [{"path": "no.jsonl", "kind": "text"}], [tmp_path, "no.jsonl"]):
        touch(tmp_path, "a.txt")
        with pytest.raises(DataError) as refusal:
            prepared(tmp_path / "cache", *sources)
        said.append(str(refusal.value).rpartition("type ")[2])
    assert said == ["data.sources=...", "data.sources.0.path=...", "data.sources.1.path=..."]
    with pytest.raises(DataError, match=r"type validation\.sources=\.\.\."):
        prepared(tmp_path / "cache", tmp_path / "a.txt", validation=ValidationSettings(sources=["no.jsonl"]))


def test_mistyped_name_beside_similar_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=r"'textes' is no file or folder .*nearest here: texts; .*data\.sources\.0\.format=hub"
    ):
        locate(SourceSettings(path="textes"))
    assert locate(SourceSettings(path="textes", format="hub")).format == "hub"
    assert locate(SourceSettings(path="wikitext-of-the-hub")).format == "hub"
