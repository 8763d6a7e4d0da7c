"""Tests of streams: bounded windows, every document once an epoch, resumed anywhere as if never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.config.schema import ValidationSettings
from ithaca.data.prepared import Prepared
from ithaca.data.rows.feed import Feed, open_feed
from ithaca.errors import DataError
from tests.data.corpus import documents, prepared, texts_of, whole, write_documents, write_lines

LENGTH = 64
KINDS = ("packed", "joined")


@pytest.fixture
def streamed(tmp_path: Path) -> Prepared:
    """Two sources, the first of two files: more than one window, less than two epochs in the rows that are read."""
    first = [write_documents(tmp_path / "a" / f"{part}.jsonl", 45, name=f"a{part}") for part in (0, 1)]
    second = write_documents(tmp_path / "b.jsonl", 25, name="b")
    return prepared(tmp_path, first[0].parent, second, streaming=True)


def feed_of(source: Prepared, kind: str, state: Any = None, **settings: Any) -> Feed:
    return open_feed(source, length=LENGTH, rows=kind, seed=4, state=state, **settings)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def rows_of_an_epoch(feed: Any) -> int:
    """Rows until the stream's state, that of the last window that was read, is of another epoch."""
    index = 0
    while not feed.state(index)["turns"]["epoch"]:
        feed.row(index)
        index += 1
    return int(feed.state(index)["row"])


@pytest.mark.parametrize("kind", KINDS)
def test_epoch_of_a_stream_holds_every_document_once(streamed: Prepared, kind: str) -> None:
    count = rows_of_an_epoch(feed_of(streamed, kind))
    feed = feed_of(streamed, kind)
    rows = [feed.row(index) for index in range(count)]
    expected = [
        whole(text) for name, size in (("a0", 45), ("a1", 45), ("b", 25)) for text in documents(size, name=name)
    ]
    read = "".join(texts_of(rows))
    assert len(read) == sum(map(len, expected))
    if kind == "joined":
        assert all(text in read for text in expected)
        assert all((row["document_ids"] >= 0).all() for row in rows[:-1])
    else:
        # Documents longer than a row are in pieces, whose order is the rows'.
        assert set(texts_of(rows)) >= {text for text in expected if len(text) <= LENGTH}
    assert feed.rows_per_epoch is None
    assert 0.9 < feed.packing_efficiency <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_stream_gives_the_same_rows(streamed: Prepared, kind: str) -> None:
    straight = feed_of(streamed, kind)
    count = rows_of_an_epoch(feed_of(streamed, kind)) + 45
    rows = [straight.row(index) for index in range(count)]
    walking = feed_of(streamed, kind)
    for index in range(0, count - 3, 3):
        if index:
            walking.row(index - 1)
        state = json.loads(json.dumps(walking.state(index)))
        resumed = feed_of(streamed, kind, state)
        assert all(same(resumed.row(later), rows[later]) for later in range(index, index + 3)), index


def test_wrong_state_gives_other_rows(streamed: Prepared) -> None:
    straight = feed_of(streamed, "joined")
    row = straight.row(100)
    state = straight.state(100)
    assert state["skip"] > 0
    assert same(feed_of(streamed, "joined", state).row(100), row)
    assert not same(feed_of(streamed, "joined", state | {"skip": state["skip"] - 1}).row(100), row)


def test_resumed_stream_unread_saves_the_same_state(streamed: Prepared) -> None:
    feed = feed_of(streamed, "packed")
    feed.row(50)
    state = feed.state(51)
    again = feed_of(streamed, "packed", state)
    assert again.state(51) == state
    assert same(feed_of(streamed, "packed", again.state(51)).row(51), feed.row(51))


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_rows_are_equal_for_every_reader(streamed: Prepared, dp: int) -> None:
    straight = feed_of(streamed, "packed")
    rows = [straight.row(index) for index in range(40)]
    for group in range(dp):
        feed = feed_of(streamed, "packed")
        assert all(same(feed.row(index), rows[index]) for index in range(group, 40, dp))


def test_earlier_row_reads_the_stream_again(streamed: Prepared) -> None:
    feed = feed_of(streamed, "packed")
    first, described = feed.row(0), feed.describe(0)
    feed.row(70)
    assert same(feed.row(0), first)
    assert feed.describe(0) == described
    assert ".jsonl:" in described
    state = feed_of(streamed, "packed").state(0)
    feed.row(70)
    later = feed_of(streamed, "packed", feed.state(70))
    with pytest.raises(DataError, match="lies before row"):
        later.row(0)
    assert state["row"] == 0


def test_other_epoch_changes_the_order_of_a_stream(streamed: Prepared) -> None:
    count = rows_of_an_epoch(feed_of(streamed, "packed"))
    feed = feed_of(streamed, "packed")
    first = [feed.row(index) for index in range(count)]
    second = [feed.row(index) for index in range(count, 2 * count)]
    assert sorted(texts_of(first)) == sorted(texts_of(second))
    assert texts_of(first) != texts_of(second)


def test_validation_share_is_held_back_from_the_stream(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 80)
    stored, streamed = (
        prepared(tmp_path, file, validation=ValidationSettings(share=0.25), seed=2, streaming=streaming)
        for streaming in (False, True)
    )
    seen = {}
    for split in ("train", "validation"):
        count = rows_of_an_epoch(open_feed(streamed, length=512, rows="packed", seed=0, split=split))
        feed = open_feed(streamed, length=512, rows="packed", seed=0, split=split)
        seen[split] = sorted(texts_of(feed.row(index) for index in range(count)))
        other = open_feed(stored, length=512, rows="packed", seed=0, split=split)
        assert other.rows_per_epoch is not None
        assert seen[split] == sorted(texts_of(other.row(index) for index in range(other.rows_per_epoch)))
    assert not set(seen["train"]) & set(seen["validation"])


def test_bad_rows_in_a_stream_are_counted_and_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "docs.jsonl", [{"text": "good"}] * 10 + [{"text": 3}] * 10)
    feed = open_feed(prepared(tmp_path, file, streaming=True), length=32, rows="packed", seed=0)
    with pytest.raises(DataError, match=r"of 20 rows .*data.bad_share"):
        feed.row(0)
    patient = open_feed(prepared(tmp_path, file, streaming=True, bad_share=0.5), length=32, rows="packed", seed=0)
    assert patient.left_out == ()
    assert texts_of([patient.row(0)])[0] == whole("good")
    (note,) = patient.left_out
    assert note.startswith(f"10 of 20 rows of {file} are no documents and are left out, the first: {file}:11: ")


@pytest.mark.parametrize(("silent", "ending"), [(20, []), (1100, [{"input_ids": [1, 2]}] * 100)])
def test_stream_without_learned_tokens_is_refused(tmp_path: Path, silent: int, ending: list[Any]) -> None:
    records = [{"input_ids": [4, 5, 6], "labels": [4, -100, -100]}] * silent
    source = prepared(tmp_path, write_lines(tmp_path / "t.jsonl", records + ending), streaming=True)
    with pytest.raises(DataError, match=r"nothing in .*t\.jsonl is to be learned.*data\.sources\.0\.labels"):
        open_feed(source, length=LENGTH, rows="packed", seed=0).row(100)


def test_targets_read_before_count_after_resuming(tmp_path: Path) -> None:
    records = [{"input_ids": [1, 2, 3]}] + [{"input_ids": [4, 5, 6], "labels": [-100] * 3}] * 1200
    source = prepared(tmp_path, write_lines(tmp_path / "t.jsonl", records), streaming=True)
    feed = feed_of(source, "packed")
    feed.row(40)
    state = feed.state(41)
    assert state["turns"]["sources"][0]["targets"] == 2
    assert same(feed_of(source, "packed", state).row(57), feed.row(57))


def test_stream_without_documents_of_a_split_is_refused(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 5)
    source = prepared(tmp_path, file, streaming=True, validation=ValidationSettings(share=1.0))
    with pytest.raises(DataError, match="no document of the stream is left for training"):
        open_feed(source, length=32, rows="packed", seed=0).row(0)


def test_state_of_other_sources_is_refused(tmp_path: Path, streamed: Prepared) -> None:
    feed = feed_of(streamed, "packed")
    feed.row(3)
    alone = prepared(tmp_path, tmp_path / "b.jsonl", streaming=True)
    with pytest.raises(DataError, match="saved with 2 sources and the run has 1"):
        feed_of(alone, "packed", feed.state(3))


def cut(file: Path, keep: float) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[: int(len(lines) * keep)]))


def other_words(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"word", b"ward"))


def fewer_first(file: Path) -> None:
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:]))


REFUSED = {
    "cut": ("a/1.jsonl", lambda file: cut(file, 0.1), "its text around rows"),
    "words of the same length": ("a/1.jsonl", other_words, "its text around rows"),
    "a row less at the start": ("b.jsonl", fewer_first, "its text around rows"),
    "a file before it": ("a/0.jsonl", fewer_first, "the first 1 of its files, read to their end, have other names"),
    "a file that is gone": ("a/0.jsonl", Path.unlink, "the first 1 of its files"),
    "a file between": (
        "a/0.jsonl",
        lambda file: file.with_name("00.jsonl").write_text('{"text": "new"}\n'),
        "its text around rows",
    ),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", REFUSED)
def test_changed_stream_is_refused(tmp_path: Path, how: str, kind: str) -> None:
    """Saved in the second file of the first source, and where a window has just ended, whose end is in it too."""
    first = [write_documents(tmp_path / "a" / f"{part}.jsonl", 200, name=f"a{part}") for part in (0, 1)]
    second = write_documents(tmp_path / "b.jsonl", 400, name="b")
    sources = first[0].parent, second
    source = prepared(tmp_path, *sources, streaming=True)
    feed, index = feed_of(source, kind), 0
    while not feed.state(index)["turns"]["sources"][0]["files"][0]:
        feed.row(index)
        index += 1
    feed.row(index + 150)
    within = feed.state(index + 150)
    walking = feed_of(source, kind)
    walking.row(within["row"] - 1)
    between = walking.state(within["row"])
    assert between["row"] < within["row"]
    states = [within, between]
    changed, change, why = REFUSED[how]
    change(tmp_path / changed)
    for state in states:
        with pytest.raises(DataError, match=f"is not what the run has read so far, .*{why}.*: put it back") as caught:
            feed_of(prepared(tmp_path, *sources, streaming=True), kind, state)
        assert "\n" not in str(caught.value)


def test_stream_without_its_current_file_is_refused(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number:02d}.txt").write_text("some words " * 20 + str(number))
    feed = feed_of(prepared(tmp_path, tmp_path / "texts", streaming=True), "packed")
    feed.row(200)
    state = feed.state(200)
    assert state["turns"]["sources"][0]["files"][0] > 30
    for file in sorted((tmp_path / "texts").iterdir())[20:]:
        file.unlink()
    with pytest.raises(DataError, match=r"it has 20 files, of which .* were read to their end"):
        feed_of(prepared(tmp_path, tmp_path / "texts", streaming=True), "packed", state)


def test_stream_changed_in_unread_files_gets_a_note(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "a" / "docs.jsonl", 500)
    feed = feed_of(prepared(tmp_path, file.parent, streaming=True), "packed")
    row, state = feed.row(40), feed.state(40)
    assert feed_of(prepared(tmp_path, file.parent, streaming=True), "packed", state).notes == ()
    cut(file, 0.9)
    again = feed_of(prepared(tmp_path, file.parent, streaming=True), "packed", state)
    assert same(again.row(40), row)
    assert len(again.notes) == 1
    assert "has files of other sizes: the run goes on" in again.notes[0]
    write_documents(tmp_path / "a" / "more.jsonl", 5)
    assert (
        "has 2 files instead of 1" in feed_of(prepared(tmp_path, file.parent, streaming=True), "packed", state).notes[0]
    )


def test_stream_writes_no_files(tmp_path: Path, streamed: Prepared) -> None:
    feed_of(streamed, "packed").row(10)
    assert not list((tmp_path / "cache").glob("*/tokens.bin"))
