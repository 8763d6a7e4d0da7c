"""Tests of files that are cut short, changed, misnamed or unreadable: one sentence each, never another exception."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from ithaca.config.schema import SourceSettings
from ithaca.data.rows.feed import open_feed
from ithaca.data.sources import compressed, read_records
from ithaca.data.sources.compressed import ZstdReader
from ithaca.errors import DataError, ZstdError
from tests.data.corpus import documents, epoch_of, prepared, texts_of, whole, write_documents, write_lines

LINES = "".join(json.dumps({"text": text}) + "\n" for text in documents(400)).encode()
PACKED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def attempt(tmp_path: Path, file: Path, **settings: Any) -> str:
    """The refusal's sentence; empty where the file is read."""
    message = ""
    try:
        prepared(tmp_path, file, **settings)
    except DataError as error:
        message = str(error)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("content", ["jsonl", "txt"])
@pytest.mark.parametrize("suffix", PACKED)
def test_damaged_compressed_file_is_named(tmp_path: Path, suffix: str, content: str, streaming: bool) -> None:
    good = PACKED[suffix](LINES)
    rng = random.Random(1)
    file = tmp_path / f"docs.{content}{suffix}"
    refused = 0
    for trial in range(24):
        data = bytearray(good)
        if trial % 2:
            data = data[: rng.randrange(len(data))]
        else:
            for _ in range(3):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        message = ""
        try:
            found = prepared(tmp_path / str(trial), file, streaming=streaming)
            open_feed(found, length=64, rows="packed", seed=0).row(0)
        except DataError as error:
            message = str(error)
        assert "\n" not in message
        assert not message or file.name in message
        refused += bool(message)
    # A stream has read the first rows only.
    assert refused >= (6 if streaming else 12)


@pytest.mark.parametrize("named", [".jsonl", *(f".jsonl{suffix}" for suffix in PACKED)])
@pytest.mark.parametrize("is_in_truth", [*PACKED, "plain", "parquet", "zip", "zst"])
def test_misnamed_file_is_refused(tmp_path: Path, named: str, is_in_truth: str) -> None:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": documents(5)}), sink)
    other = {
        "plain": LINES,
        "parquet": sink.getvalue(),
        "zip": b"PK\3\4" + b"\0" * 90,
        "zst": b"\x28\xb5\x2f\xfd" + b"\0" * 90,
    }
    content = PACKED[is_in_truth](LINES) if is_in_truth in PACKED else other[is_in_truth]
    file = tmp_path / f"docs{named}"
    file.write_bytes(content)
    right = named.endswith(is_in_truth) or (named == ".jsonl" and is_in_truth == "plain")
    message = attempt(tmp_path, file)
    assert bool(message) != right
    if not right:
        assert file.name in message
        assert "by its first bytes" in message


def test_text_that_begins_like_bzip2_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("BZh is how they begin", encoding="utf-8")
    assert attempt(tmp_path, tmp_path / "a.txt") == ""
    (tmp_path / "b.txt").write_bytes(gzip.compress(b"x"))
    assert "it is gzip by its first bytes" in attempt(tmp_path, tmp_path / "b.txt")


def test_zstd_frames_are_read_to_the_last_or_refused() -> None:
    """The reader of zstd frames runs on the standard library's bzip2 decompressors, which have the same interface."""
    whole_file = bz2.compress(LINES) + bz2.compress(b"more\n") + bz2.compress(b"")
    assert (
        io.BufferedReader(ZstdReader(io.BytesIO(whole_file), bz2.BZ2Decompressor, OSError)).read() == LINES + b"more\n"
    )
    assert len(io.BufferedReader(ZstdReader(io.BytesIO(whole_file), bz2.BZ2Decompressor, OSError)).readlines()) == 401
    for cut in (5, len(bz2.compress(LINES)) + 3, len(whole_file) - 1):
        with pytest.raises(EOFError, match="before the end of a compressed frame"):
            io.BufferedReader(ZstdReader(io.BytesIO(whole_file[:cut]), bz2.BZ2Decompressor, OSError)).read()
    broken = bytearray(whole_file)
    broken[40] ^= 255
    with pytest.raises(ZstdError):
        io.BufferedReader(ZstdReader(io.BytesIO(bytes(broken)), bz2.BZ2Decompressor, OSError)).read()


def test_zstd_without_its_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "docs.jsonl.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 90)
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    monkeypatch.setitem(__import__("sys").modules, "compression", None)
    assert "pip install 'ithaca[zstd]'" in attempt(tmp_path, file)
    # With one, here made of bzip2, the rows are read and what is cut is refused.
    monkeypatch.setattr(compressed, "_zstd", lambda _: (bz2.BZ2Decompressor, OSError))
    monkeypatch.setattr(compressed, "_MAGIC", {"zstd": b"BZh"})
    monkeypatch.setattr(compressed, "_kind", lambda head: "zstd" if head.startswith(b"BZh") else None)
    file.write_bytes(bz2.compress(LINES))
    assert prepared(tmp_path, file).stores[0].about["documents"] == 400
    file.write_bytes(bz2.compress(LINES)[:-9])
    assert "docs.jsonl.zst cannot be read (it ended before" in attempt(tmp_path, file)


ROWS = {
    "a number of many digits": b'{"text": "good", "n": ' + b"7" * 6000 + b"}",
    "numbers that are none": b'{"text": "good", "n": [NaN, Infinity, -Infinity, 1e999]}',
    "a key twice": b'{"text": "bad", "text": "good"}',
    "a NUL": b'{"text": "good", "n": "\\u0000"}',
}
BAD_ROWS = {
    "nested": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested elsewhere": b'{"text": "x", "n": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "no UTF-8": b'{"text": "caf\xe9"}',
    "cut": b'{"text": "ca',
    "bytes": bytes(range(1, 10)) + bytes(range(11, 256)),
    "a number": b"7",
    "a list in the column": b'{"text": [[["x"]]]}',
    "a number of many digits in the column": b'{"text": ' + b"7" * 6000 + b"}",
}


@pytest.mark.parametrize("how", ROWS)
def test_bad_value_in_unused_column_loses_no_row(tmp_path: Path, how: str) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + ROWS[how] + b"\n")
    feed = open_feed(prepared(tmp_path, file), length=16, rows="packed", seed=0)
    assert texts_of(epoch_of(feed)) == [whole("good")]


@pytest.mark.parametrize("how", BAD_ROWS)
def test_bad_row_is_named_by_its_line(tmp_path: Path, how: str) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + BAD_ROWS[how] + b"\n")
    about = prepared(tmp_path, file, bad_share=0.5).stores[0].about
    assert (about["documents"], about["bad"]) == (1, 1)
    assert about["named"][0].startswith(f"{file}:2: ")


@pytest.mark.parametrize("value", [[2**70], [2**63], [1, 2**64], [1e400], [[1], [2, 3]], [True, "x"], {"a": 1}, [None]])
def test_invalid_token_ids_make_a_bad_row(tmp_path: Path, value: Any) -> None:
    file = write_lines(tmp_path / "t.jsonl", [{"input_ids": [1, 2, 3]}, {"input_ids": value}])
    about = prepared(tmp_path, SourceSettings(path=str(file), kind="tokens"), bad_share=0.5).stores[0].about
    assert about["named"][0].startswith(f"{file}:2: ")


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"[1, 2", b'[{"text": "good"}, ' + b"9" * 6000 + b"]", b"[]", b"[\n", b""]
)
def test_damaged_json_array_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "docs.json"
    file.write_bytes(content)
    assert "docs.json" in attempt(tmp_path, file, bad_share=0.4)


def test_line_above_the_largest_is_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_records, "LARGEST", 1000)
    lines = [{"text": "good"}, {"text": "x" * 5000}, {"text": "also good"}]
    file = write_lines(tmp_path / "docs.jsonl", lines)
    about = prepared(tmp_path, file, bad_share=0.5).stores[0].about
    assert about["documents"] == 2
    assert about["named"][0].startswith(f"{file}:2: a line of more than ")
    (tmp_path / "a.txt").write_text("x" * 5000, encoding="utf-8")
    assert "split the document" in attempt(tmp_path, tmp_path / "a.txt")


def parquet(file: Path, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


def test_column_without_documents_is_not_read(tmp_path: Path) -> None:
    far = pyarrow.array([2**60] * 3, pyarrow.timestamp("us"))
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, pyarrow.array([b"\xff\xfe", b"a", b"b"], pyarrow.binary()).buffers()
    )
    file = parquet(tmp_path / "docs.parquet", when=far, text=documents(3), note=bad, days=far)
    found = prepared(tmp_path, file)
    assert found.stores[0].about["documents"] == 3
    feed = open_feed(prepared(tmp_path, file, streaming=True), length=512, rows="packed", seed=0)
    assert whole(documents(3)[0]) in texts_of([feed.row(0)])


def test_duplicate_document_column_is_refused(tmp_path: Path) -> None:
    texts = [pyarrow.array(documents(3)), pyarrow.array(["x", "y", "z"])]
    file = tmp_path / "docs.parquet"
    pyarrow.parquet.write_table(pyarrow.table(texts, names=["text", "text"]), file)
    assert "docs.parquet has more than one column 'text': rename" in attempt(tmp_path, file)
    pyarrow.parquet.write_table(pyarrow.table([*texts, texts[1]], names=["text", "id", "id"]), file)
    assert prepared(tmp_path, file).stores[0].about["documents"] == 3


def test_unreadable_cell_is_named_and_the_rest_kept(tmp_path: Path) -> None:
    texts = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, pyarrow.array([b"good", b"caf\xe9", b"more"], pyarrow.binary()).buffers()
    )
    file = parquet(tmp_path / "docs.parquet", id=[1, 2, 3], text=texts)
    about = prepared(tmp_path, file, bad_share=0.5).stores[0].about
    assert about["documents"] == 2
    assert about["named"] == [f"{file}:2: 'text' is bytes that are not UTF-8 (byte 3)"]
    far = pyarrow.array([[2**60], None, [1]], pyarrow.list_(pyarrow.timestamp("us")))
    file = parquet(tmp_path / "far.parquet", text=far)
    message = attempt(tmp_path, Path(file), bad_share=0.9)
    assert "far.parquet" in message


@pytest.mark.parametrize("column", [[1, 2, 3], [1.5, 2.5, 3.5], [None] * 3, [True, False, True], [[1.5], [2.5], []]])
def test_column_of_wrong_type_is_refused_by_name(tmp_path: Path, column: Any) -> None:
    file = parquet(tmp_path / "docs.parquet", text=column, id=[1, 2, 3])
    assert "docs.parquet: no column holds text" in attempt(tmp_path, file)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_parquet_is_one_sentence(tmp_path: Path, seed: int) -> None:
    good = parquet(tmp_path / "good.parquet", text=documents(300), id=list(range(300))).read_bytes()
    rng = random.Random(seed)
    file = tmp_path / "docs.parquet"
    for trial in range(16):
        data = bytearray(good)
        if trial % 4 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            for _ in range(trial % 4):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        message = attempt(tmp_path / str(trial), file, bad_share=0.9)
        assert not message or "docs.parquet" in message


def test_text_refused_by_the_tokenizer_makes_a_bad_row(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from ithaca.config.schema import DataSettings, ValidationSettings
    from ithaca.data.prepared import prepare

    inner = Tokenizer(models.WordLevel({"good": 0, "</s>": 1}, unk_token="<missing>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    file = write_lines(tmp_path / "docs.jsonl", [{"text": "good good"}, {"text": "bad"}])
    data = DataSettings(sources=[str(file)], bad_share=0.5)
    found = prepare(data, tokenizer, validation=ValidationSettings(), seed=0, folder=tmp_path / "cache")
    assert found.stores[0].about["named"][0].startswith(f"{file}:2: the tokenizer does not take it (")


def test_file_removed_meanwhile_is_named(tmp_path: Path) -> None:
    from ithaca.data.sources.locate import locate

    file = write_documents(tmp_path / "docs.jsonl", 3)
    located = locate(SourceSettings(path=str(file)))
    file.unlink()
    with pytest.raises(DataError, match=r"docs\.jsonl was there a moment ago"):
        located.fingerprint()
