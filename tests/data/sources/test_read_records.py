"""Tests of the reading of each format: compressed lines, JSON arrays, parquet, and datasets of the hub."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ithaca.config.schema import SourceSettings
from ithaca.data.rows.feed import open_feed
from ithaca.data.sources.locate import locate
from ithaca.data.sources.read_records import open_rows, raw_rows
from ithaca.errors import DataError
from tests.data.corpus import documents, epoch_of, prepared, source_texts, texts_of, touch, whole, write_documents


def test_file_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    touch(tmp_path / "docs", "a.txt")
    (tmp_path / "docs" / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "docs" / "c.txt").write_bytes(b"\xef\xbb\xbfmarked")
    about = prepared(tmp_path, tmp_path / "docs", bad_share=0.5).stores[0].about
    assert about["documents"] == 2
    assert about["named"] == [f"{tmp_path}/docs/b.txt: not UTF-8 (byte 3)"]
    assert source_texts(locate(SourceSettings(path=str(tmp_path / "docs" / "c.txt")))) == ["marked"]


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)])
def test_compressed_jsonl_is_read(tmp_path: Path, suffix: str, opener: object) -> None:
    plain = write_documents(tmp_path / "plain.jsonl", 5)
    packed = tmp_path / f"docs.json{suffix}"
    with opener(packed, "wb") as file:
        file.write(plain.read_bytes())
    located = locate(SourceSettings(path=str(packed)))
    assert located.format == "jsonl"
    assert source_texts(located) == documents(5)


def test_truncated_compressed_file_is_refused(tmp_path: Path) -> None:
    packed = tmp_path / "docs.jsonl.gz"
    packed.write_bytes(gzip.compress(write_documents(tmp_path / "plain.jsonl", 500).read_bytes())[:-200])
    with pytest.raises(DataError, match=r"docs.jsonl.gz cannot be read .*is it whole"):
        source_texts(locate(SourceSettings(path=str(packed))))


def test_zstd_file_is_read_or_its_package_named(tmp_path: Path) -> None:
    packed = tmp_path / "docs.jsonl.zst"
    packed.write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(DataError, match=r"ithaca\[zstd\]|cannot be read"):
        source_texts(locate(SourceSettings(path=str(packed))))


def test_json_array_gives_its_items(tmp_path: Path) -> None:
    file = tmp_path / "docs.json"
    file.write_text(json.dumps([{"text": text} for text in documents(4)], indent=1), encoding="utf-8")
    located = locate(SourceSettings(path=str(file)))
    assert source_texts(located) == documents(4)
    assert [raw.origin for raw in raw_rows(located, open_rows(located, streaming=False))][3] == f"{file}:4"


def test_parquet_rows_are_read(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]] * 3
    table = pyarrow.table({"id": [1, 2, 3], "messages": messages, "source": ["a", "b", "c"]})
    pyarrow.parquet.write_table(table, tmp_path / "chat.parquet")
    store = prepared(tmp_path, tmp_path / "chat.parquet").stores[0]
    assert (store.about["kind"], store.about["column"], store.about["documents"]) == ("chat", "messages", 3)
    assert store.origin(2) == f"{tmp_path}/chat.parquet:3"
    (tmp_path / "broken.parquet").write_bytes(b"PAR1nonsense")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        prepared(tmp_path, tmp_path / "broken.parquet")


def test_parquet_of_utf8_bytes_is_text(tmp_path: Path) -> None:
    values = [text.encode() for text in documents(3)] + [b"caf\xe9"]
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3, 4], "text": values}), tmp_path / "docs.parquet")
    bytes_of = prepared(tmp_path, tmp_path / "docs.parquet", bad_share=0.3)
    about = bytes_of.stores[0].about
    assert (about["kind"], about["documents"]) == ("text", 3)
    assert about["named"] == [f"{tmp_path}/docs.parquet:4: 'text' is bytes that are not UTF-8 (byte 3)"]
    feed = open_feed(bytes_of, length=256, rows="packed", seed=0)
    assert sorted(texts_of(epoch_of(feed))) == sorted(map(whole, documents(3)))


def test_hub_name_without_network_is_refused(tmp_path: Path) -> None:
    located = locate(SourceSettings(path="nobody/nothing-here"))
    assert located.format == "hub"
    with pytest.raises(DataError, match=r"no file or folder here, and the hub gave no dataset of that name \("):
        prepared(tmp_path, "nobody/nothing-here")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A hub that has `owner/set`, in several shards; gives the calls it got."""
    calls: list[tuple[object, ...]] = []

    def load(path: str, subset: str | None, *, split: str, streaming: bool) -> object:
        calls.append((path, subset, split, streaming))
        rows = datasets.Dataset.from_list([{"id": place, "text": text} for place, text in enumerate(documents(90))])
        return rows.to_iterable_dataset(num_shards=4) if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def test_hub_name_is_read(tmp_path: Path, hub: list[tuple[object, ...]]) -> None:
    store = prepared(tmp_path, SourceSettings(path="owner/set", subset="en", split="dev")).stores[0]
    assert hub[0] == ("owner/set", "en", "dev", False)
    assert (store.about["documents"], store.about["column"]) == (90, "text")
    assert store.origin(16) == "owner/set:17"


@pytest.mark.parametrize("at", [1, 30, 90])
def test_hub_stream_resumes_exactly(tmp_path: Path, hub: list[tuple[object, ...]], at: int) -> None:
    """`datasets`' own state is at the row, not at the batch or the shard."""
    source = prepared(tmp_path, "owner/set", streaming=True)
    straight = open_feed(source, length=64, rows="joined", seed=0)
    rows = [straight.row(index) for index in range(at + 5)]
    walked = open_feed(source, length=64, rows="joined", seed=0)
    walked.row(at - 1)
    resumed = open_feed(source, length=64, rows="joined", seed=0, state=json.loads(json.dumps(walked.state(at))))
    for index in range(at, at + 5):
        assert texts_of([resumed.row(index)]) == texts_of([rows[index]])
        assert resumed.describe(index) == straight.describe(index)
    assert hub[-1] == ("owner/set", None, "train", True)
