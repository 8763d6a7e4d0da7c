"""Small sets of documents on disk, and functions that read them back, for the tests of `data/`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from ithaca.config.schema import DataSettings, ValidationSettings
from ithaca.data.prepared import Prepared, prepare
from ithaca.data.rows.feed import Feed
from ithaca.data.sources.locate import FoundSource
from ithaca.data.sources.read_records import open_rows, parse_row, raw_rows
from ithaca.models.files.embedded import BOS, EOS, embedded_tokenizer

TOKENIZER = embedded_tokenizer()


def write_lines(file: Path, records: Iterable[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def documents(count: int, *, name: str = "document") -> list[str]:
    """Texts of many lengths, all different."""
    return [f"{name} {place}:" + " word" * (place * 7 % 41) for place in range(count)]


def write_documents(file: Path, count: int, *, name: str = "document") -> Path:
    return write_lines(file, ({"text": text} for text in documents(count, name=name)))


def prepared(
    folder: Path, *sources: Any, validation: ValidationSettings | None = None, seed: int = 0, **settings: Any
) -> Prepared:
    """Prepare sources with the byte-level tokenizer; the cache is in `folder`."""
    given = [str(source) if isinstance(source, Path) else source for source in sources]
    return prepare(
        DataSettings(sources=given, **settings),
        TOKENIZER,
        validation=validation or ValidationSettings(),
        seed=seed,
        folder=folder / "cache",
    )


def texts_of(rows: Iterable[dict[str, Tensor]]) -> list[str]:
    """The documents (or pieces) in rows, decoded, without padding."""
    found = []
    for row in rows:
        ids, numbers = row["input_ids"][0], row["document_ids"][0]
        for number in range(int(numbers.max()) + 1):
            found.append(TOKENIZER.decode(ids[numbers == number]))
    return found


def epoch_of(feed: Feed) -> list[dict[str, Tensor]]:
    assert feed.rows_per_epoch is not None
    return [feed.row(index) for index in range(feed.rows_per_epoch)]


def whole(text: str) -> str:
    """A plain document as it is trained on."""
    return f"{BOS}{text}{EOS}"


def source_texts(located: FoundSource) -> list[str]:
    """Return the texts of a source's rows."""
    return [parse_row(raw)["text"] for raw in raw_rows(located, open_rows(located, streaming=False))]


def touch(root: Path, *files: str, content: str = "x = 1\n") -> None:
    """Write files, in folders that are made, with one content."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(content, encoding="utf-8")
