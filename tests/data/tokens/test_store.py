"""Tests of stores whose files were damaged after they were written: made again, or refused when the damage is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ithaca.data.tokens import store as stores
from ithaca.data.tokens.store import Store, StoreWriter, open_store
from ithaca.errors import DataError


def written(folder: Path, *, masked: bool) -> Store:
    """Forty documents of a hundred tokens."""
    writer = StoreWriter.start(folder, 1000)
    for number in range(40):
        ids = np.arange(100) + number
        writer.add(ids, ids % 2 == 0 if masked else None, "docs.jsonl", number + 1)
    writer.finish({"named": ("one",)})
    store = open_store(folder)
    assert store is not None
    return store


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["about.json", "offsets.npy", "origins.npy"])
def test_store_with_changed_small_file_is_not_opened(tmp_path: Path, name: str) -> None:
    written(tmp_path / "store", masked=False)
    file = tmp_path / "store" / name
    good = file.read_bytes()
    for at in range(0, len(good), 7):
        flip(file, at)
        store = open_store(tmp_path / "store")
        # A letter of the checksum's own name makes it a store of before there were any, with all else as it was.
        assert store is None or store.about["tokens"] == 4000
        if store is not None:
            assert '"check"' not in file.read_text()
        file.write_bytes(good)
    assert open_store(tmp_path / "store") is not None


@pytest.mark.parametrize("name", ["tokens.bin", "learn.bin"])
def test_changed_block_is_refused_when_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_BLOCK", 256)
    written(tmp_path / "store", masked=True)
    size = 2 if name == "tokens.bin" else 1
    # Token 1,000 is in document 10.
    flip(tmp_path / "store" / name, 1000 * size)
    store = open_store(tmp_path / "store")
    assert store is not None
    assert store.piece(0, 0, 100)[0].tolist() == list(range(100))
    assert store.piece(39, 0, 100)[0].tolist() == list(range(39, 139))
    with pytest.raises(DataError, match="has changed since it was written"):
        store.piece(10, 0, 100)
    # Not only the first time.
    with pytest.raises(DataError, match="has changed since it was written"):
        store.piece(10, 0, 1)


def test_block_is_summed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_BLOCK", 256)
    written(tmp_path / "store", masked=False)
    store = open_store(tmp_path / "store")
    assert store is not None
    store.piece(0, 0, 100)
    assert store.tokens.seen == {0}
    store.piece(1, 27, 1)
    assert store.tokens.seen == {0}
    store.piece(1, 27, 40)
    assert store.tokens.seen == {0, 1}
    assert store.piece(5, 100, 0)[0].tolist() == []


def test_store_without_checksums_is_read(tmp_path: Path) -> None:
    written(tmp_path / "store", masked=True)
    file = tmp_path / "store" / "about.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in about.items() if key not in ("blocks", "check")}))
    store = open_store(tmp_path / "store")
    assert store is not None
    assert store.piece(3, 5, 4)[0].tolist() == [8, 9, 10, 11]
    assert store.piece(3, 5, 4)[1].tolist() == [True, False, True, False]
