"""Rows of a parquet file as records, in batches, of the needed columns only.

A cell that Python cannot hold does not lose its row: a string that is not UTF-8 comes as its bytes, another cell (a
timestamp out of range) as `unreadable(reason)`.

Invariant: every row of the file is yielded, in order; columns that were not read are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ithaca.errors import DataError

# Rows of a batch, fewer where they are large: `_BYTES` on average.
_ROWS = 256
_BYTES = 32 << 20


def parquet_rows(
    file: str, columns: Sequence[str] | None, unreadable: Callable[[str], Any]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file. `columns`: those to read; None for all that could hold documents."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as opened:
            schema = opened.schema_arrow
            needed = [
                field.name for field in schema if _may_hold_documents(field.type) or field.name in (columns or ())
            ]
            needed = [name for name in needed if columns is None or name in columns]
            twice = next((name for name in needed if columns is not None and needed.count(name) > 1), None)
            if twice is not None:
                raise DataError(
                    f"{file} has more than one column {twice!r}: rename all but the one that holds the documents"
                )
            if not needed:
                yield from (dict.fromkeys(schema.names) for _ in range(opened.metadata.num_rows))
                return
            for batch in opened.iter_batches(_batch_rows(opened.metadata), columns=needed):
                yield from _records(batch, schema.names, unreadable)
    except DataError:
        raise
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        why = " ".join(str(error).split())[:300]
        raise DataError(f"{file} cannot be read as parquet ({why}): is it whole, and parquet?") from None


def _may_hold_documents(kind: Any) -> bool:
    """True for text, bytes and nested types: chat messages, token ids and their masks."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _may_hold_documents(kind.value_type)
    texts = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(fits(kind) for fits in texts) or types.is_nested(kind)


def _batch_rows(metadata: Any) -> int:
    size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    return max(1, min(_ROWS, _BYTES * metadata.num_rows // max(1, size)))


def _records(batch: Any, names: Sequence[str], unreadable: Callable[[str], Any]) -> Iterator[dict[str, Any]]:
    columns = {name: _cells(batch.column(at), unreadable) for at, name in enumerate(batch.schema.names)}
    for row in range(batch.num_rows):
        yield {name: columns[name][row] if name in columns else None for name in names}


def _cells(column: Any, unreadable: Callable[[str], Any]) -> list[Any]:
    try:
        return column.to_pylist()
    except (ValueError, OverflowError, TypeError):
        # ArrowInvalid and UnicodeDecodeError are ValueErrors. One bad cell fails the whole column, so cell by cell now.
        return [_cell(column, row, unreadable) for row in range(len(column))]


def _cell(column: Any, row: int, unreadable: Callable[[str], Any]) -> Any:
    import pyarrow

    one = column.slice(row, 1)
    try:
        return one[0].as_py()
    except (ValueError, OverflowError, TypeError) as error:
        if pyarrow.types.is_string(one.type) or pyarrow.types.is_large_string(one.type):
            return one.cast(pyarrow.large_binary())[0].as_py()
        return unreadable(f"cannot be read ({' '.join(str(error).split())[:200]})")
