"""Caches of tokenized documents that an earlier version made are used as they are."""

from __future__ import annotations

from pathlib import Path

from tests.compat.held import Typed


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a cache but locks, with its time."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"]
    return {str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def test_cache_of_texts_and_rows_is_used_and_not_made_again(work: Path, typed: Typed) -> None:
    before = contents(work / "cache")
    for name in ("stages", "ended"):
        status, _, said = typed(f"prepare {name}.yaml")
        assert status == 0, said
    assert contents(work / "cache") == before


def test_cache_of_chats_is_made_again_with_a_warning(work: Path, typed: Typed) -> None:
    # The earlier version let messages end their own turns.
    before = contents(work / "cache")
    status, _, said = typed("prepare chats.yaml")
    assert status == 0, said
    now = contents(work / "cache")
    assert now.keys() == before.keys()
    assert now != before
