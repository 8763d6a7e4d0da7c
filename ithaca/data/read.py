"""Raw rows of a located source, as a `datasets.IterableDataset` whatever the format: one type to drain or to stream.

A raw row says where it came from and holds a line of bytes, a record, or nothing (the whole file is the document).
Lines are parsed later, by `parse_row`, so that skipping to a place costs only the reading.

Invariant: files in the order of `Located.files` and rows in the files' order; the dataset is cut by file, so its own
`state_dict` says exactly where to go on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]

from ithaca.data.sources import Located
from ithaca.errors import DataError

if TYPE_CHECKING:
    from datasets import IterableDataset

_BATCH = 256
_MARK = b"\xef\xbb\xbf"


class RowError(Exception):
    """A row that is no document; the message is the reason. Counted and named, not fatal."""


@dataclass(frozen=True, slots=True)
class Raw:
    """Where a row stands (`row` counts from 1; 0 is the whole file), what is there, and about how many bytes of it."""

    file: str
    row: int
    value: object
    size: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.row}" if self.row else self.file


def open_rows(located: Located, *, streaming: bool) -> IterableDataset:
    """The rows of a source, for `raw_rows`. From the hub, `streaming` reads over the network and keeps nothing."""
    from datasets import IterableDataset

    if located.format == "hub":
        return _open_hub(located, streaming)
    readers = {"jsonl": _json_rows, "parquet": _parquet_rows, "text": _whole_files, "code": _whole_files}
    return IterableDataset.from_generator(readers[located.format], gen_kwargs={"files": list(located.files)})


def raw_rows(located: Located, rows: IterableDataset, first: int = 1) -> Iterator[Raw]:
    """The same as `Raw`s; the hub's rows are numbered from `first`."""
    for number, record in enumerate(rows, first):
        if located.format == "hub":
            yield Raw(located.name, number, record, _size(record))
        else:
            file, row, value = record["file"], record["row"], record["value"]
            yield Raw(file, row, value, _size(value) if row else os.path.getsize(file))


def _size(value: object) -> int:
    """Bytes of a line; letters and ids of a record."""
    if isinstance(value, Mapping):
        return sum(len(inner) for inner in value.values() if isinstance(inner, str | bytes | list))
    return len(value) if isinstance(value, bytes) else 0


def parse_row(raw: Raw) -> Mapping[str, Any]:
    """The record of a raw row; RowError where a line is no JSON object or a file is not UTF-8."""
    value = raw.value
    if value is None and not raw.row:
        return {"text": _whole_text(raw.file)}
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError(f"not JSON ({error.msg}, column {error.colno})") from None
        except (UnicodeDecodeError, RecursionError) as error:
            raise RowError(f"not JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise RowError(f"{type(value).__name__} instead of an object with named fields")
    return value


def json_list(value: object) -> list[Any] | None:
    """The list that a string of JSON holds, as tables keep what has no type of its own; None for all else."""
    try:
        items = json.loads(value) if isinstance(value, str | bytes) else None
    except (ValueError, RecursionError):
        return None
    return items if isinstance(items, list) else None


def encodable(text: str) -> str:
    """The text itself; RowError where JSON's escapes left half of a surrogate pair in it, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise RowError(f"letter {error.start} is {half}, half of a surrogate pair: not Unicode text") from None
    return text


def _whole_text(file: str) -> str:
    try:
        with _open(file) as opened:
            return str(opened.read(), "utf-8-sig")
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 (byte {error.start})") from None
    except (OSError, EOFError) as error:
        raise RowError(f"cannot be read ({error})") from None


def _open(file: str) -> Any:
    if file.endswith(".zst") and "zstd" not in fsspec.available_compressions():
        raise DataError(f"{file} is compressed by zstd: `pip install zstandard`, or unpack it")
    return fsspec.open(file, "rb", compression="infer")


def _whole_files(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield {"file": file, "row": 0, "value": None}


def _json_rows(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Lines, or the items of one array where a file is that; empty lines are nothing."""
    for file in files:
        try:
            with _open(file) as opened:
                for number, line in enumerate(opened, 1):
                    line = line.removeprefix(_MARK) if number == 1 else line
                    if number == 1 and line.lstrip().startswith(b"["):
                        yield from _json_array(file, line + opened.read())
                        break
                    if line.strip():
                        yield {"file": file, "row": number, "value": line}
        except (OSError, EOFError) as error:
            raise DataError(f"{file} cannot be read ({error}): is it whole, and what its name says?") from None


def _json_array(file: str, content: bytes) -> Iterator[dict[str, Any]]:
    try:
        items = json.loads(content)
    except ValueError:
        # Lines that are arrays, not objects, begin the same way: they are named one by one.
        items = [line for line in content.splitlines() if line.strip()]
    for number, item in enumerate(items, 1):
        yield {"file": file, "row": number, "value": item}


def _parquet_rows(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    for file in files:
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(_BATCH):
                    for record in batch.to_pylist():
                        number += 1
                        yield {"file": file, "row": number, "value": record}
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{file} cannot be read as parquet ({error}): is it whole, and parquet?") from None


def _open_hub(located: Located, streaming: bool) -> IterableDataset:
    from datasets import load_dataset

    source = located.source
    try:
        opened = load_dataset(source.path, source.subset, split=source.split, streaming=streaming)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise DataError(
            f"{source.path!r} is no file or folder here, and the hub gave no dataset of that name ({why}): correct the "
            "path, set subset and split, or fetch it where there is a network"
        ) from None
    return opened if streaming else opened.to_iterable_dataset()
