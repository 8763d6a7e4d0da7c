"""Tests from files to rows: content, cache, bad rows, validation split, many processes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ithaca.config.schema import DataSettings, SourceSettings, ValidationSettings
from ithaca.data.prepared import changed_sources, prepare
from ithaca.data.rows.feed import open_feed
from ithaca.data.rows.shuffle import held_back
from ithaca.errors import DataError
from ithaca.sequence.batch import count_targets
from tests.data.corpus import TOKENIZER, documents, epoch_of, prepared, texts_of, whole, write_documents, write_lines


@pytest.mark.parametrize("rows", ["packed", "joined"])
def test_epoch_of_rows_holds_every_document_once(tmp_path: Path, rows: str) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 60)
    feed = open_feed(prepared(tmp_path, file), length=256, rows=rows, seed=0)
    read = epoch_of(feed)
    if rows == "packed":
        assert sorted(texts_of(read)) == sorted(whole(text) for text in documents(60))
    else:
        joined = "".join(texts_of(read))
        assert len(joined) == sum(len(whole(text)) for text in documents(60))
        assert all(whole(text) in joined for text in documents(60))
    real = torch.cat([row["document_ids"][0] >= 0 for row in read])
    assert real.float().mean().item() == pytest.approx(feed.packing_efficiency)


def test_row_has_labels_and_documents_for_the_loss(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "docs.jsonl", [{"text": "abc"}, {"text": "de"}])
    row = open_feed(prepared(tmp_path, file), length=12, rows="packed", seed=0).row(0)
    begin, end, pad = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
    assert sorted(row) == ["document_ids", "input_ids", "labels"]
    assert {(values.dtype, tuple(values.shape)) for values in row.values()} == {(torch.int64, (1, 12))}
    assert row["input_ids"][0].tolist() == [begin, *b"abc", end, begin, *b"de", end, pad, pad, pad]
    assert row["labels"][0].tolist() == [-100, *b"abc", end, -100, *b"de", end, -100, -100, -100]
    assert row["document_ids"][0].tolist() == [0] * 5 + [1] * 4 + [-1] * 3
    assert count_targets(row) == 7


def test_fingerprint_depends_on_content_alone(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)
    first = prepared(tmp_path, file).fingerprint
    file.touch()
    assert prepared(tmp_path, file).fingerprint == first
    elsewhere = write_documents(tmp_path / "elsewhere.jsonl", 20)
    assert prepared(tmp_path, elsewhere).fingerprint == first
    assert prepared(tmp_path, write_documents(tmp_path / "more.jsonl", 21)).fingerprint != first


def test_id_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    found = prepared(tmp_path, write_lines(tmp_path / "docs.jsonl", [{"text": "abc"}]))
    largest = max(TOKENIZER.bos_token_id, TOKENIZER.eos_token_id)
    found.check_vocabulary(largest + 1)
    with pytest.raises(DataError, match=f"holds the id {largest}, this model's vocabulary is 0 to {largest - 1}"):
        found.check_vocabulary(largest)


def test_bad_rows_are_counted_and_named(tmp_path: Path) -> None:
    file = tmp_path / "docs.jsonl"
    lines = ['{"text": "good"}'] * 95
    lines[3:3] = ["{broken", '{"text": 7}', '{"text": "  "}', '"a string"', '{"other": "x"}']
    file.write_text("\n".join([*lines, "", ""]), encoding="utf-8")
    about = prepared(tmp_path, file, bad_share=0.05).stores[0].about
    assert (about["rows"], about["bad"], about["documents"]) == (100, 5, 95)
    named = dict(text.split(": ", 1) for text in about["named"])
    assert {int(place.rpartition(":")[2]) for place in named} == {4, 5, 6, 7, 8}
    assert "not JSON" in named[f"{file}:4"]
    assert "'text' is a int" in named[f"{file}:5"]
    assert "empty" in named[f"{file}:6"]
    assert "instead of an object" in named[f"{file}:7"]
    assert "no 'text', only 'other'" in named[f"{file}:8"]
    with pytest.raises(DataError, match=r"5 of 100 rows .* data.bad_share allows 0.04 .*docs.jsonl:4: not JSON"):
        prepared(tmp_path, file, bad_share=0.04)


@pytest.mark.parametrize(
    ("content", "settings", "match"),
    [
        ("", {}, "is empty: it holds no rows"),
        ('{"text": ""}\n{"text": " "}\n', {}, "no document is left.*'text' is empty"),
        ("nonsense\n" * 5, {}, "5 of 5 rows .*no document is left.*docs.jsonl:1: not JSON"),
        ('{"text": "x"}\n', {"column": "body"}, "no column 'body': there are 'text'"),
        ('{"a": "x", "b": "y"}\n', {}, "no column holds text, chat messages or token ids: there are 'a', 'b'"),
        ('{"text": "x"}\n', {"kind": "chat"}, "no column holds kind 'chat': there are 'text'"),
    ],
)
def test_source_without_documents_is_refused(
    tmp_path: Path, content: str, settings: dict[str, str], match: str
) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=match):
        prepared(tmp_path, SourceSettings(path=str(file), **settings))


def test_source_of_bad_rows_alone_stops_early(tmp_path: Path) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_text('{"text": "good"}\n' + '{"text": 1}\n' * 20, encoding="utf-8")
    source = SourceSettings(path=str(file), column="text")
    with pytest.raises(DataError, match="20 of 21 rows"):
        prepared(tmp_path, source)
    file.write_text('{"text": 1}\n' * 5000, encoding="utf-8")
    with pytest.raises(DataError, match=r"no column holds"):
        prepared(tmp_path, source)
    file.write_text('{"text": ""}\n' * 5000, encoding="utf-8")
    with pytest.raises(DataError, match=r"1,000 of 1,000 rows"):
        prepared(tmp_path, source)


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    records = [
        {"input_ids": [1, 2, 3]},
        {"input_ids": [4, 5, 6], "labels": [-100, 5, -100]},
        {"input_ids": [4, 5, 6], "labels": [5, 6, -100]},
        {"input_ids": [4, 5, 9999]},
        {"input_ids": [4, 5], "labels": [4]},
        {"input_ids": [0.5, 1.5]},
    ]
    feed_of = prepared(tmp_path, write_lines(tmp_path / "t.jsonl", records), bad_share=0.7)
    about = feed_of.stores[0].about
    assert (about["kind"], about["documents"], about["bad"]) == ("tokens", 2, 4)
    reasons = " ".join(about["named"])
    for reason in ("not shifted", "has the id 9999", "1 entries for 2 tokens", "no list of whole numbers"):
        assert reason in reasons
    row = open_feed(feed_of, length=8, rows="packed", seed=0).row(0)
    labels = {tuple(row["labels"][0][row["document_ids"][0] == number].tolist()) for number in (0, 1)}
    assert labels == {(-100, 2, 3), (-100, 5, -100)}


@pytest.mark.parametrize(
    "record", [{"input_ids": [4, 5, 6], "labels": [4, -100, -100]}, {"input_ids": [4]}], ids=["masked", "too short"]
)
def test_data_without_learned_tokens_is_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    silent = write_lines(tmp_path / "silent.jsonl", [record] * 3)
    spoken = write_lines(tmp_path / "spoken.jsonl", [record, {"input_ids": [4, 5]}])
    assert prepared(tmp_path, spoken).stores[0].about["targets"] == 1
    match = r"nothing in .*silent\.jsonl is to be learned: .*of one token, .*-100; mend them, or set \w+\.sources\.\d\.labels"
    # The second time it is in the cache.
    for _ in range(2):
        with pytest.raises(DataError, match=match):
            prepared(tmp_path, spoken, silent)
    with pytest.raises(DataError, match=match):
        prepared(tmp_path, spoken, validation=ValidationSettings(sources=[SourceSettings(path=str(silent))]))


def test_chat_column_is_found_and_masked(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    file = write_lines(tmp_path / "chat.jsonl", [{"id": "a", "messages": messages}])
    row = open_feed(prepared(tmp_path, file), length=16, rows="packed", seed=0).row(0)
    learned = row["input_ids"][0][row["labels"][0] >= 0]
    assert TOKENIZER.decode(learned) == "yo<|end|>"
    everything = open_feed(prepared(tmp_path, file, learn="all"), length=16, rows="packed", seed=0).row(0)
    assert count_targets(everything) == count_targets(row) + 5


def test_chat_template_from_a_file_is_read(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": messages}])
    template = tmp_path / "chat.jinja"
    template.write_text(TOKENIZER.chat_template.replace("<|end|>", "<|eos|>"), encoding="utf-8")
    row = open_feed(prepared(tmp_path, file, chat_template=str(template)), length=16, rows="packed", seed=0).row(0)
    assert TOKENIZER.decode(row["input_ids"][0][row["labels"][0] >= 0]) == "yo<|eos|>"
    with pytest.raises(DataError, match="no Jinja template and no file"):
        prepared(tmp_path, file, chat_template=str(tmp_path / "none.jinja"))


def test_validation_share_holds_documents_back(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 200)
    both = prepared(tmp_path, file, validation=ValidationSettings(share=0.2), seed=3)
    feeds = {
        split: open_feed(both, length=256, rows="packed", seed=0, split=split) for split in ("train", "validation")
    }
    train, held = (set(texts_of(epoch_of(feed))) for feed in feeds.values())
    assert not train & held
    assert train | held == {whole(text) for text in documents(200)}
    assert 20 <= len(held) <= 60
    # A leak would be seen.
    assert (train | set(list(held)[:1])) & held


def test_added_documents_move_none_between_splits() -> None:
    small = held_back(np.arange(100), 1, 0, 0.1)
    assert (held_back(np.arange(1000), 1, 0, 0.1)[:100] == small).all()
    assert (held_back(np.arange(100), 2, 0, 0.1) != small).any()
    assert (held_back(np.arange(100), 1, 1, 0.1) != small).any()
    assert held_back(np.arange(100_000), 1, 0, 0.1).mean() == pytest.approx(0.1, abs=0.005)
    assert not held_back(np.arange(100), 1, 0, 0.0).any()
    assert held_back(np.arange(100), 1, 0, 1.0).all()


def test_validation_sources_give_the_validation_rows(tmp_path: Path) -> None:
    train = write_documents(tmp_path / "docs.jsonl", 30)
    other = write_documents(tmp_path / "held.jsonl", 10, name="held")
    both = prepared(
        tmp_path, train, validation=ValidationSettings(share=0.5, sources=[SourceSettings(path=str(other))])
    )
    texts = [
        sorted(texts_of(epoch_of(open_feed(both, length=256, rows="packed", seed=0, split=split))))
        for split in ("train", "validation")
    ]
    assert texts[0] == sorted(whole(text) for text in documents(30))
    assert texts[1] == sorted(whole(text) for text in documents(10, name="held"))


def test_split_without_documents_is_refused(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 5)
    with pytest.raises(DataError, match=r"set validation\.share or validation\.sources"):
        open_feed(prepared(tmp_path, file), length=64, rows="packed", seed=0, split="validation")
    with pytest.raises(DataError, match="no document is left for train"):
        open_feed(prepared(tmp_path, file, validation=ValidationSettings(share=1.0)), length=64, rows="packed", seed=0)


def test_row_is_described_by_file_and_line(tmp_path: Path) -> None:
    first = write_documents(tmp_path / "a.jsonl", 3)
    second = write_documents(tmp_path / "b.jsonl", 3, name="other")
    feed = open_feed(prepared(tmp_path, first, second), length=1024, rows="packed", seed=0)
    described = feed.describe(0)
    for file in (first, second):
        for line in (1, 2, 3):
            assert f"{file}:{line} [0:" in described
    assert feed.state(0) == {}


def test_empty_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        prepare(DataSettings(sources=[]), TOKENIZER, validation=ValidationSettings(), seed=0, folder=tmp_path)


def test_changed_source_is_named(tmp_path: Path) -> None:
    one, two = (write_documents(tmp_path / f"{name}.jsonl", 3, name=name) for name in ("one", "two"))
    before = prepared(tmp_path, one, two).sources
    assert changed_sources(before, prepared(tmp_path, one, two).sources) == "the documents"
    write_documents(two, 4, name="two")
    now = prepared(tmp_path, one, two).sources
    assert changed_sources(before, now) == f"the documents of {two} (4 now, 3 then)"
    assert changed_sources(None, now) == changed_sources(before[:1], now) == "the documents"
