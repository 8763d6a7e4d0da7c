"""From files to rows: what is in them, the cache, bad rows, the validation split, many processes at once."""

from __future__ import annotations

import copy
import errno
import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ithaca.config.schema import Data, Source, Validation
from ithaca.data.prepared import changed_sources, prepare
from ithaca.data.rows.feed import open_feed
from ithaca.data.rows.shuffle import held_back
from ithaca.data.sources.read_records import Raw
from ithaca.data.tokens import tokenize_source
from ithaca.data.tokens.store import open_store
from ithaca.data.tokens.tokenize_source import encode_rows
from ithaca.errors import DataError
from ithaca.sequence.batch import count_targets
from tests.data.corpus import TOKENIZER, documents, epoch_of, prepared, texts_of, whole, write_documents, write_lines


@pytest.mark.parametrize("rows", ["packed", "joined"])
def test_rows_hold_every_document_once(tmp_path: Path, rows: str) -> None:
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
    assert real.float().mean().item() == pytest.approx(feed.fill)


def test_a_row_is_fit_for_the_loss(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "docs.jsonl", [{"text": "abc"}, {"text": "de"}])
    row = open_feed(prepared(tmp_path, file), length=12, rows="packed", seed=0).row(0)
    begin, end, pad = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
    assert sorted(row) == ["document_ids", "input_ids", "labels"]
    assert {(values.dtype, tuple(values.shape)) for values in row.values()} == {(torch.int64, (1, 12))}
    assert row["input_ids"][0].tolist() == [begin, *b"abc", end, begin, *b"de", end, pad, pad, pad]
    assert row["labels"][0].tolist() == [-100, *b"abc", end, -100, *b"de", end, -100, -100, -100]
    assert row["document_ids"][0].tolist() == [0] * 5 + [1] * 4 + [-1] * 3
    assert count_targets(row) == 7


def test_prepared_once_and_opened_ever_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)
    first = prepared(tmp_path, file)
    monkeypatch.setattr("ithaca.data.tokens.tokenize_source._write", lambda *_: pytest.fail("tokenized again"))
    assert prepared(tmp_path, file).fingerprint == first.fingerprint
    # Another split of the same tokens needs none either.
    other = prepared(tmp_path, file, validation=Validation(share=0.5))
    assert other.stores[0].folder == first.stores[0].folder
    assert other.fingerprint != first.fingerprint


def test_changed_content_is_tokenized_again(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)
    first = prepared(tmp_path, file)
    write_documents(file, 21)
    second = prepared(tmp_path, file)
    assert second.stores[0].about["documents"] == 21
    assert second.fingerprint != first.fingerprint


def test_documents_are_known_by_what_they_hold(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)
    first = prepared(tmp_path, file).fingerprint
    file.touch()
    assert prepared(tmp_path, file).fingerprint == first
    elsewhere = write_documents(tmp_path / "elsewhere.jsonl", 20)
    assert prepared(tmp_path, elsewhere).fingerprint == first
    assert prepared(tmp_path, write_documents(tmp_path / "more.jsonl", 21)).fingerprint != first


def test_ids_that_a_model_does_not_have_are_named(tmp_path: Path) -> None:
    found = prepared(tmp_path, write_lines(tmp_path / "docs.jsonl", [{"text": "abc"}]))
    largest = max(TOKENIZER.bos_token_id, TOKENIZER.eos_token_id)
    found.check_vocabulary(largest + 1)
    with pytest.raises(DataError, match=f"holds the id {largest}, this model's vocabulary is 0 to {largest - 1}"):
        found.check_vocabulary(largest)


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "about.json"])
def test_a_broken_cache_is_not_read(tmp_path: Path, name: str) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)
    folder = prepared(tmp_path, file).stores[0].folder
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    assert open_store(folder) is None
    again = prepared(tmp_path, file)
    assert sorted(texts_of(epoch_of(open_feed(again, length=256, rows="packed", seed=0)))) == sorted(
        whole(text) for text in documents(20)
    )


def test_a_crash_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)

    def crash(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(DataError, match=r"cache .* cannot be written \(no space left\).*data\.cache"):
        prepared(tmp_path, file)
    monkeypatch.undo()
    assert not list((tmp_path / "cache").glob("*/about.json"))
    assert prepared(tmp_path, file).stores[0].about["documents"] == 20


def test_the_first_works_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 50)
    written: list[Path] = []

    def slow_write(*given: Any) -> None:
        written.append(given[3])
        time.sleep(0.3)
        write(*given)

    write = tokenize_source._write
    monkeypatch.setattr(tokenize_source, "_write", slow_write)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: prepared(tmp_path, file).fingerprint, range(3)))
    assert len(set(found)) == 1
    assert len(written) == 1


def _prepare_in_process(folder: str, file: str, told: multiprocessing.SimpleQueue[str]) -> None:
    told.put(prepared(Path(folder), Path(file)).fingerprint)


@pytest.mark.slow
def test_many_processes_at_once(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 200)
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    processes = [context.Process(target=_prepare_in_process, args=(str(tmp_path), str(file), told)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * 3
    assert len({told.get() for _ in range(3)}) == 1
    assert len(list((tmp_path / "cache").glob("*/about.json"))) == 1


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
def test_what_is_no_data_is_an_error(tmp_path: Path, content: str, settings: dict[str, str], match: str) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=match):
        prepared(tmp_path, Source(path=str(file), **settings))


def test_hopeless_data_stops_early(tmp_path: Path) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_text('{"text": "good"}\n' + '{"text": 1}\n' * 20, encoding="utf-8")
    source = Source(path=str(file), column="text")
    with pytest.raises(DataError, match="20 of 21 rows"):
        prepared(tmp_path, source)
    file.write_text('{"text": 1}\n' * 5000, encoding="utf-8")
    with pytest.raises(DataError, match=r"no column holds"):
        prepared(tmp_path, source)
    file.write_text('{"text": ""}\n' * 5000, encoding="utf-8")
    with pytest.raises(DataError, match=r"1,000 of 1,000 rows"):
        prepared(tmp_path, source)


def test_pre_tokenized(tmp_path: Path) -> None:
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
    told = " ".join(about["named"])
    for reason in ("not shifted", "has the id 9999", "1 entries for 2 tokens", "no list of whole numbers"):
        assert reason in told
    row = open_feed(feed_of, length=8, rows="packed", seed=0).row(0)
    labels = {tuple(row["labels"][0][row["document_ids"][0] == number].tolist()) for number in (0, 1)}
    assert labels == {(-100, 2, 3), (-100, 5, -100)}


@pytest.mark.parametrize(
    "record", [{"input_ids": [4, 5, 6], "labels": [4, -100, -100]}, {"input_ids": [4]}], ids=["masked", "too short"]
)
def test_data_in_which_nothing_is_learned_is_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    silent = write_lines(tmp_path / "silent.jsonl", [record] * 3)
    spoken = write_lines(tmp_path / "spoken.jsonl", [record, {"input_ids": [4, 5]}])
    assert prepared(tmp_path, spoken).stores[0].about["targets"] == 1
    match = r"nothing in .*silent\.jsonl is to be learned: .*of one token, .*-100; mend them, or set \w+\.sources\.\d\.labels"
    # The second time it is in the cache.
    for _ in range(2):
        with pytest.raises(DataError, match=match):
            prepared(tmp_path, spoken, silent)
    with pytest.raises(DataError, match=match):
        prepared(tmp_path, spoken, validation=Validation(sources=[Source(path=str(silent))]))


def test_chat_is_found_and_masked(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    file = write_lines(tmp_path / "chat.jsonl", [{"id": "a", "messages": messages}])
    row = open_feed(prepared(tmp_path, file), length=16, rows="packed", seed=0).row(0)
    learned = row["input_ids"][0][row["labels"][0] >= 0]
    assert TOKENIZER.decode(learned) == "yo<|end|>"
    everything = open_feed(prepared(tmp_path, file, learn="all"), length=16, rows="packed", seed=0).row(0)
    assert count_targets(everything) == count_targets(row) + 5


def test_a_template_from_a_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": messages}])
    template = tmp_path / "chat.jinja"
    template.write_text(TOKENIZER.chat_template.replace("<|end|>", "<|eos|>"), encoding="utf-8")
    row = open_feed(prepared(tmp_path, file, chat_template=str(template)), length=16, rows="packed", seed=0).row(0)
    assert TOKENIZER.decode(row["input_ids"][0][row["labels"][0] >= 0]) == "yo<|eos|>"
    with pytest.raises(DataError, match="no Jinja template and no file"):
        prepared(tmp_path, file, chat_template=str(tmp_path / "none.jinja"))


def test_another_token_that_the_template_names_is_another_cache(tmp_path: Path) -> None:
    """`bos_token` stands in the tokenizer's settings, not in its vocabulary."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": messages}])
    template = "{{ bos_token }}" + TOKENIZER.chat_template

    def first_token(tokenizer: Any) -> str:
        data = Data(sources=[str(file)], chat_template=template, learn="all")
        found = prepare(data, tokenizer, validation=Validation(), seed=0, folder=tmp_path / "cache")
        return str(tokenizer.decode(found.stores[0].piece(0, 0, 1)[0]))

    assert first_token(TOKENIZER) == TOKENIZER.bos_token
    other = copy.deepcopy(TOKENIZER)
    other.bos_token = TOKENIZER.eos_token
    assert first_token(other) == TOKENIZER.eos_token


def test_validation_share(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 200)
    both = prepared(tmp_path, file, validation=Validation(share=0.2), seed=3)
    feeds = {
        split: open_feed(both, length=256, rows="packed", seed=0, split=split) for split in ("train", "validation")
    }
    train, held = (set(texts_of(epoch_of(feed))) for feed in feeds.values())
    assert not train & held
    assert train | held == {whole(text) for text in documents(200)}
    assert 20 <= len(held) <= 60
    # A leak would be seen.
    assert (train | set(list(held)[:1])) & held


def test_no_document_changes_sides_when_others_come() -> None:
    small = held_back(np.arange(100), 1, 0, 0.1)
    assert (held_back(np.arange(1000), 1, 0, 0.1)[:100] == small).all()
    assert (held_back(np.arange(100), 2, 0, 0.1) != small).any()
    assert (held_back(np.arange(100), 1, 1, 0.1) != small).any()
    assert held_back(np.arange(100_000), 1, 0, 0.1).mean() == pytest.approx(0.1, abs=0.005)
    assert not held_back(np.arange(100), 1, 0, 0.0).any()
    assert held_back(np.arange(100), 1, 0, 1.0).all()


def test_validation_sources_of_their_own(tmp_path: Path) -> None:
    train = write_documents(tmp_path / "docs.jsonl", 30)
    other = write_documents(tmp_path / "held.jsonl", 10, name="held")
    both = prepared(tmp_path, train, validation=Validation(share=0.5, sources=[Source(path=str(other))]))
    texts = [
        sorted(texts_of(epoch_of(open_feed(both, length=256, rows="packed", seed=0, split=split))))
        for split in ("train", "validation")
    ]
    assert texts[0] == sorted(whole(text) for text in documents(30))
    assert texts[1] == sorted(whole(text) for text in documents(10, name="held"))


def test_no_validation_and_nothing_left_are_errors(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 5)
    with pytest.raises(DataError, match=r"set validation\.share or validation\.sources"):
        open_feed(prepared(tmp_path, file), length=64, rows="packed", seed=0, split="validation")
    with pytest.raises(DataError, match="no document is left for train"):
        open_feed(prepared(tmp_path, file, validation=Validation(share=1.0)), length=64, rows="packed", seed=0)


def test_several_sources_are_described_by_file_and_line(tmp_path: Path) -> None:
    first = write_documents(tmp_path / "a.jsonl", 3)
    second = write_documents(tmp_path / "b.jsonl", 3, name="other")
    feed = open_feed(prepared(tmp_path, first, second), length=1024, rows="packed", seed=0)
    told = feed.describe(0)
    for file in (first, second):
        for line in (1, 2, 3):
            assert f"{file}:{line} [0:" in told
    assert feed.state(0) == {}


def test_a_cache_that_can_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else tokenized, and the disk is mounted for reading."""
    file = write_documents(tmp_path / "docs.jsonl", 20)
    first = prepared(tmp_path, file)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("ithaca.data.tokens.tokenize_source.locked", refuse)
    assert prepared(tmp_path, file).fingerprint == first.fingerprint
    with pytest.raises(DataError, match=r"cannot be written .*Read-only"):
        prepared(tmp_path, write_documents(tmp_path / "more.jsonl", 20))


class Ended:
    """An encoder whose process is ended as the kernel does where memory is full."""

    def __call__(self, *_: object) -> list[Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


def test_a_tokenizing_process_that_is_killed_is_told_in_a_sentence() -> None:
    rows = iter([Raw("docs.jsonl", row, b'{"text": "a"}', 13) for row in range(1, 500)])
    with pytest.raises(DataError, match="one of the 2 processes that tokenize was ended"):
        list(encode_rows(rows, Ended(), 2))  # type: ignore[arg-type]


@pytest.mark.slow
def test_processes_of_their_own_give_the_same_tokens(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 400)
    one = prepared(tmp_path / "one", file).stores[0]
    two = prepared(tmp_path / "two", file, workers=2).stores[0]
    assert (one.tokens.values == two.tokens.values).all()
    assert (one.origins == two.origins).all()


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        prepare(Data(sources=[]), TOKENIZER, validation=Validation(), seed=0, folder=tmp_path)


def test_the_cache_of_the_run_file_wins(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 5)
    store = prepared(tmp_path, file, cache=str(tmp_path / "mine")).stores[0]
    assert store.folder.parent == tmp_path / "mine"
    assert json.loads((store.folder / "about.json").read_text())["documents"] == 5


def test_a_log_gets_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor the empty line that a bar leaves behind which was never drawn."""
    data = Data(sources=[Source(path=str(write_documents(tmp_path / "docs.jsonl", 5)))])
    prepare(data, TOKENIZER, validation=Validation(), seed=0, folder=tmp_path / "cache", progress=True)
    assert capfd.readouterr() == ("", "")


def test_the_source_that_changed_is_named(tmp_path: Path) -> None:
    one, two = (write_documents(tmp_path / f"{name}.jsonl", 3, name=name) for name in ("one", "two"))
    before = prepared(tmp_path, one, two).sources
    assert changed_sources(before, prepared(tmp_path, one, two).sources) == "the documents"
    write_documents(two, 4, name="two")
    now = prepared(tmp_path, one, two).sources
    assert changed_sources(before, now) == f"the documents of {two} (4 now, 3 then)"
    assert changed_sources(None, now) == changed_sources(before[:1], now) == "the documents"
