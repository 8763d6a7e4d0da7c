"""Raw rows of a located source, as a `datasets.IterableDataset` for every format: to tokenize once or to stream.

    jsonl       a line of bytes              parquet, hub   a record
    text, code  nothing: the file is the document

`parse_row` parses lines later, so that skipping to a saved position costs only the reading.

A file that cannot be read to its end (cut short, changed, misnamed) is a DataError with its name; a row that is no
document, or a cell that cannot be read, is a RowError with its file and row.

Invariant: files in the order of `FoundSource.files`, rows in the files' order. The dataset's shards are the files, so its
`state_dict` has the exact position.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ithaca.config.messages import near_paths
from ithaca.data.sources.compressed import FAULTS, open_file
from ithaca.data.sources.locate import FoundSource
from ithaca.data.sources.parquet import parquet_rows
from ithaca.errors import DataError, RowError

if TYPE_CHECKING:
    from datasets import IterableDataset

# Largest line or text file in bytes. A user has to split longer documents.
LARGEST = 1 << 30
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Marker in place of a line or a cell that cannot be read."""

    reason: str


@dataclass(frozen=True, slots=True)
class RawRow:
    """Unparsed row: its file, its number (from 1; 0 is the whole file), its value, and about how many bytes it has."""

    file: str
    row: int
    value: object
    size: int

    @property
    def origin(self) -> str:
        return f"{self.file}:{self.row}" if self.row else self.file


def open_rows(located: FoundSource, *, streaming: bool, columns: Sequence[str] | None = None) -> IterableDataset:
    """Open the rows of a source, for `raw_rows`.

    `streaming`: read a hub dataset over the network and keep nothing. `columns`: those to read of a table; None for all
    that could hold documents.
    """
    from datasets import IterableDataset

    if located.format == "hub":
        return _open_hub(located, streaming)
    files = list(located.files)
    if located.format == "parquet":
        # A tuple: datasets splits every list in gen_kwargs into shards, and needs lists of one length.
        needed = None if columns is None else tuple(columns)
        return IterableDataset.from_generator(_table_rows, gen_kwargs={"files": files, "columns": needed})
    readers = {"jsonl": _json_rows, "text": _whole_files, "code": _whole_files}
    return IterableDataset.from_generator(readers[located.format], gen_kwargs={"files": files})


def raw_rows(located: FoundSource, rows: IterableDataset, first: int = 1) -> Iterator[RawRow]:
    """Yield the rows as RawRow; a hub dataset's rows are numbered from `first`."""
    if located.format == "hub":
        yield from _hub_rows(located.name, rows, first)
        return
    for record in rows:
        file, row, value = record["file"], record["row"], record["value"]
        # Two copies of a large row must not be alive while it is tokenized.
        del record
        yield RawRow(file, row, value, _size(value) if row else _file_size(file))


def _hub_rows(name: str, rows: IterableDataset, first: int) -> Iterator[RawRow]:
    number, iterator = first, iter(rows)
    while True:
        try:
            record = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            # A hub dataset's own code may raise anything; the row's number is all we can add.
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise DataError(
                f"row {number:,} of {name} cannot be read ({why}): name its files as sources instead"
            ) from None
        yield RawRow(name, number, record, _size(record))
        number += 1


def _file_size(file: str) -> int:
    try:
        return os.path.getsize(file)
    except OSError:
        return 0


def _size(value: object) -> int:
    """Return the bytes of a line, or the letters and ids of a record."""
    if isinstance(value, Mapping):
        return sum(len(inner) for inner in value.values() if isinstance(inner, str | bytes | list))
    return len(value) if isinstance(value, bytes) else 0


def parse_row(raw: RawRow) -> Mapping[str, Any]:
    """Return the record of a raw row; RowError if a line is no JSON object or a file is not UTF-8."""
    value = raw.value
    if value is None and not raw.row:
        return {"text": _whole_text(raw.file)}
    if isinstance(value, bytes):
        value = parse_json(value)
    if isinstance(value, Unreadable):
        raise RowError(value.reason)
    if not isinstance(value, Mapping):
        raise RowError(f"{type(value).__name__} instead of an object with named fields")
    return value


def parse_json(line: bytes) -> Any:
    """Parse a line of JSON; RowError if that fails."""
    try:
        try:
            return json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:
            # Python refuses integers of more than 4,300 digits. No document needs one, so the row is kept.
            return json.loads(line, parse_int=_int_or_float)
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON ({error})") from None


def _int_or_float(digits: str) -> float:
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def json_list(value: object) -> list[Any] | None:
    """Return the list in a string of JSON, as tables often keep messages; None for any other value."""
    try:
        items = json.loads(value) if isinstance(value, str | bytes) else None
    except (ValueError, RecursionError):
        return None
    return items if isinstance(items, list) else None


def encodable(text: str) -> str:
    """Return the text; RowError if JSON's escapes left half of a surrogate pair in it, which no tokenizer takes."""
    # In chunks: an encoded copy of a whole text may not fit into memory.
    for start in range(0, len(text), 1 << 20):
        try:
            text[start : start + (1 << 20)].encode()
        except UnicodeEncodeError as error:
            at = start + error.start
            half = f"U+{ord(text[at]):04X}"
            raise RowError(f"letter {at} is {half}, half of a surrogate pair: not Unicode text") from None
    return text


def _whole_text(file: str) -> str:
    try:
        with open_file(file) as opened:
            content = opened.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise RowError(_too_large("a file"))
        return str(content, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 (byte {error.start})") from None
    except FAULTS as error:
        raise RowError(f"cannot be read ({error})") from None


def _too_large(what: str) -> str:
    return f"{what} of more than {LARGEST >> 30} GiB: split the document into several"


def _whole_files(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield {"file": file, "row": 0, "value": None}


def _json_rows(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of each file that are not empty, or the items of a file that is one JSON array."""
    for file in files:
        try:
            with open_file(file) as opened:
                for number, line in enumerate(_lines(opened), 1):
                    if number == 1 and isinstance(line, bytes):
                        line = line.removeprefix(_BYTE_ORDER_MARK)
                        # One JSON array: parsed whole, since json has no incremental parser.
                        if line.lstrip().startswith(b"["):
                            yield from _json_array(file, line + opened.read())
                            break
                    if isinstance(line, Unreadable) or line.strip():
                        yield {"file": file, "row": number, "value": line}
        except FAULTS as error:
            raise DataError(f"{file} cannot be read ({error}): is it whole, and what its name says?") from None


def _lines(opened: Any) -> Iterator[bytes | Unreadable]:
    """Yield lines of up to `LARGEST` bytes; a longer line is read in chunks and dropped."""
    while line := opened.readline(LARGEST + 1):
        if len(line) <= LARGEST:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = opened.readline(1 << 24)
        yield Unreadable(_too_large("a line"))


def _json_array(file: str, content: bytes) -> Iterator[dict[str, Any]]:
    try:
        items = parse_json(content)
    except RowError:
        # A file of lines that are arrays begins in the same way: each line is a bad row of its own.
        items = [line for line in content.splitlines() if line.strip()]
    for number, item in enumerate(items, 1):
        yield {"file": file, "row": number, "value": item}


def _table_rows(files: Sequence[str], columns: tuple[str, ...] | None) -> Iterator[dict[str, Any]]:
    for file in files:
        for number, record in enumerate(parquet_rows(file, columns, Unreadable), 1):
            yield {"file": file, "row": number, "value": record}


def _open_hub(located: FoundSource, streaming: bool) -> IterableDataset:
    from datasets import load_dataset

    source = located.source
    try:
        opened = load_dataset(source.path, source.subset, split=source.split, streaming=streaming)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise DataError(
            f"{source.path!r} is no file or folder here, and the hub gave no dataset of that name ({why}): type "
            f"{located.key.words()}, set its subset and split, or fetch it where there is a network"
            f"{near_paths(Path(source.path))}"
        ) from None
    return opened if streaming else opened.to_iterable_dataset()
