"""Kind of a source's documents: plain text, chat messages, token ids, prompts with completions; and their column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ithaca.data.sources.locate import FoundSource
from ithaca.data.sources.read_records import json_list
from ithaca.data.tokens.pairs import ALPACA, PAIR
from ithaca.errors import DataError

# Usual names of columns, in the order of preference.
_CHAT = ("messages", "conversations", "conversation", "chat", "dialogue")
_TOKENS = ("input_ids", "tokens", "token_ids")
_TEXT = ("text", "content", "document", "code", "body", "article")


@dataclass(frozen=True, slots=True)
class DocumentKind:
    """Kind of documents and the column that has them."""

    name: str
    column: str


def find_kind(located: FoundSource, records: Sequence[Mapping[str, Any]], where: str) -> DocumentKind:
    """Return the kind of a source from its settings and first records. `where`: file of the first record."""
    source, key = located.source, located.key.setting
    columns = list(dict.fromkeys(column for record in records for column in record))
    if source.column is not None and source.column not in columns:
        raise DataError(
            f"{where} has no column {source.column!r}: there are {quoted_names(columns)}; set {key('column')}{located.advice}"
        )
    found = _look(records, [source.column] if source.column else columns, source.kind)
    if source.kind != "auto":
        found = [kind for kind in found if source.kind in (kind.name, kind.name.removeprefix("chat "))]
    if found:
        return found[0]
    needed = "text, chat messages or token ids" if source.kind == "auto" else f"kind {source.kind!r}"
    raise DataError(
        f"{where}: no column holds {needed}: there are {quoted_names(columns)}; set {key('column')} and kind to what is there"
        f"{located.advice}"
    )


def quoted_names(columns: Sequence[str]) -> str:
    return ", ".join(repr(column) for column in columns[:20]) or "none"


def _look(records: Sequence[Mapping[str, Any]], columns: Sequence[str], source_kind: str) -> list[DocumentKind]:
    """Return the columns that could be documents, best first: usual names, then pairs, then a lone text column."""
    kinds = {column: _kind_of(_values(records, column, source_kind)) for column in columns}
    usual = [
        DocumentKind(kind, column)
        for kind, names in (("chat", _CHAT), ("tokens", _TOKENS), ("text", _TEXT))
        for column in names
        if kinds.get(column) == kind
    ]
    # A column of an unusual name is taken only if no other column could be meant.
    others = [
        DocumentKind(kind, column) for column, kind in kinds.items() if kind and DocumentKind(kind, column) not in usual
    ]
    pairs = [
        DocumentKind(name, names[0])
        for name, names, held in (("pair", PAIR, "text"), ("chat pair", PAIR, "chat"), ("alpaca", ALPACA, "text"))
        if all(kinds.get(column) == held for column in names)
    ]
    return usual + pairs + (others if len(others) == 1 or len(columns) == 1 else [])


def _values(records: Sequence[Mapping[str, Any]], column: str, source_kind: str) -> list[Any]:
    """Return a column's values. If its name or the source's kind says chat, strings of JSON are parsed to messages."""
    values = [record[column] for record in records if column in record]
    if source_kind != "chat" and (source_kind != "auto" or column not in _CHAT):
        return values
    written = [items for value in values if (items := json_list(value)) and isinstance(items[0], Mapping)]
    return written or values


def _kind_of(values: Sequence[Any]) -> str | None:
    """Return the kind of the first value that is not empty; None if it is no document."""
    for value in values:
        if isinstance(value, str | bytes):
            return "text"
        if isinstance(value, Sequence | np.ndarray) and len(value):
            first = value[0]
            if isinstance(first, Mapping):
                return "chat"
            if isinstance(first, int | np.integer) and not isinstance(first, bool):
                return "tokens"
    return None
