"""Tests of the cache of tokenized sources: made once, by one process of many, and made again if damaged or changed."""

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

import pytest

from ithaca.config.schema import DataSettings, SourceSettings, ValidationSettings
from ithaca.data.prepared import prepare
from ithaca.data.rows.feed import open_feed
from ithaca.data.sources.read_records import RawRow
from ithaca.data.tokens import tokenize_source
from ithaca.data.tokens.encode_rows import encode_rows
from ithaca.data.tokens.store import open_store
from ithaca.errors import DataError
from tests.data.corpus import TOKENIZER, documents, epoch_of, prepared, texts_of, whole, write_documents, write_lines


def test_second_prepare_opens_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)
    first = prepared(tmp_path, file)
    monkeypatch.setattr("ithaca.data.tokens.tokenize_source._write", lambda *_: pytest.fail("tokenized again"))
    assert prepared(tmp_path, file).fingerprint == first.fingerprint
    # Another split of the same tokens needs none either.
    other = prepared(tmp_path, file, validation=ValidationSettings(share=0.5))
    assert other.stores[0].folder == first.stores[0].folder
    assert other.fingerprint != first.fingerprint


def test_changed_file_is_tokenized_again(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)
    first = prepared(tmp_path, file)
    write_documents(file, 21)
    second = prepared(tmp_path, file)
    assert second.stores[0].about["documents"] == 21
    assert second.fingerprint != first.fingerprint


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "about.json"])
def test_damaged_cache_is_made_again(tmp_path: Path, name: str) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)
    folder = prepared(tmp_path, file).stores[0].folder
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    assert open_store(folder) is None
    again = prepared(tmp_path, file)
    assert sorted(texts_of(epoch_of(open_feed(again, length=256, rows="packed", seed=0)))) == sorted(
        whole(text) for text in documents(20)
    )


def test_crash_while_tokenizing_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 20)

    def crash(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(DataError, match=r"cache .* cannot be written \(no space left\).*data\.cache"):
        prepared(tmp_path, file)
    monkeypatch.undo()
    assert not list((tmp_path / "cache").glob("*/about.json"))
    assert prepared(tmp_path, file).stores[0].about["documents"] == 20


def test_second_process_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def _prepare_in_process(folder: str, file: str, fingerprints: multiprocessing.SimpleQueue[str]) -> None:
    fingerprints.put(prepared(Path(folder), Path(file)).fingerprint)


@pytest.mark.slow
def test_many_processes_prepare_one_store(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 200)
    context = multiprocessing.get_context("spawn")
    fingerprints = context.SimpleQueue()
    processes = [
        context.Process(target=_prepare_in_process, args=(str(tmp_path), str(file), fingerprints)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * 3
    assert len({fingerprints.get() for _ in range(3)}) == 1
    assert len(list((tmp_path / "cache").glob("*/about.json"))) == 1


def test_changed_token_in_the_template_changes_the_cache(tmp_path: Path) -> None:
    """`bos_token` stands in the tokenizer's settings, not in its vocabulary."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": messages}])
    template = "{{ bos_token }}" + TOKENIZER.chat_template

    def first_token(tokenizer: Any) -> str:
        data = DataSettings(sources=[str(file)], chat_template=template, learn="all")
        found = prepare(data, tokenizer, validation=ValidationSettings(), seed=0, folder=tmp_path / "cache")
        return str(tokenizer.decode(found.stores[0].piece(0, 0, 1)[0]))

    assert first_token(TOKENIZER) == TOKENIZER.bos_token
    other = copy.deepcopy(TOKENIZER)
    other.bos_token = TOKENIZER.eos_token
    assert first_token(other) == TOKENIZER.eos_token


def test_read_only_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_killed_tokenizing_process_is_one_sentence() -> None:
    rows = iter([RawRow("docs.jsonl", row, b'{"text": "a"}', 13) for row in range(1, 500)])
    with pytest.raises(DataError, match="one of the 2 processes that tokenize was ended"):
        list(encode_rows(rows, Ended(), 2))  # type: ignore[arg-type]


@pytest.mark.slow
def test_pool_of_processes_gives_the_same_tokens(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 400)
    one = prepared(tmp_path / "one", file).stores[0]
    two = prepared(tmp_path / "two", file, workers=2).stores[0]
    assert (one.tokens.values == two.tokens.values).all()
    assert (one.origins == two.origins).all()


def test_cache_of_the_run_file_is_used(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "docs.jsonl", 5)
    store = prepared(tmp_path, file, cache=str(tmp_path / "mine")).stores[0]
    assert store.folder.parent == tmp_path / "mine"
    assert json.loads((store.folder / "about.json").read_text())["documents"] == 5


def test_log_file_gets_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor the empty line that a bar leaves behind which was never drawn."""
    data = DataSettings(sources=[SourceSettings(path=str(write_documents(tmp_path / "docs.jsonl", 5)))])
    prepare(data, TOKENIZER, validation=ValidationSettings(), seed=0, folder=tmp_path / "cache", progress=True)
    assert capfd.readouterr() == ("", "")
