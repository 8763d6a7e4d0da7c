"""Records to tokens: plain text, chat messages or ids that are tokens already.

`find_kind` looks at the first records and says which column holds the documents and what they are; an `Encoder` then
turns records into `Encoded`: ids, and which of them are learned (None: all).

Invariant: a plain document ends with EOS and begins with BOS where the tokenizer adds it; padding of ids that are
tokens already is dropped by the record's mask; a record that is no document raises RowError with the reason and changes
nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ithaca.config import Source
from ithaca.data.chat import ChatEncoder
from ithaca.data.read import RowError, encodable, json_list
from ithaca.errors import DataError

_CHAT = ("messages", "conversations", "conversation", "chat", "dialogue")
_TOKENS = ("input_ids", "tokens", "token_ids")
_TEXT = ("text", "content", "document", "code", "body", "article")
_MASK = "attention_mask"
_IGNORE = -100


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document's ids, and which of them are learned; None where all are."""

    ids: NDArray[Any]
    learn: NDArray[np.bool_] | None

    @property
    def targets(self) -> int:
        """Tokens that are predicted and learned: nothing predicts the first."""
        return len(self.ids[1:]) if self.learn is None else int(self.learn[1:].sum())


@dataclass(frozen=True, slots=True)
class Kind:
    """What documents are and the column that has them."""

    name: str
    column: str


def find_kind(source: Source, records: Sequence[Mapping[str, Any]], where: str) -> Kind:
    """From the source's settings where given, else from the records' columns and what is in them."""
    columns = list(dict.fromkeys(column for record in records for column in record))
    if source.column is not None and source.column not in columns:
        raise DataError(
            f"{where} has no column {source.column!r}: there are {_names(columns)}; set data.sources.column"
        )
    found = _look(records, [source.column] if source.column else columns, source.kind)
    if source.kind != "auto":
        found = [kind for kind in found if kind.name == source.kind]
    if found:
        return found[0]
    wanted = "text, chat messages or token ids" if source.kind == "auto" else f"kind {source.kind!r}"
    raise DataError(
        f"{where}: no column holds {wanted}: there are {_names(columns)}; set data.sources.column and kind to what is there"
    )


def _names(columns: Sequence[str]) -> str:
    return ", ".join(repr(column) for column in columns[:20]) or "none"


def _look(records: Sequence[Mapping[str, Any]], columns: Sequence[str], wanted: str) -> list[Kind]:
    """Columns that could be documents, best first: by the usual names, then a lone column of text."""
    kinds = {column: _kind_of(_values(records, column, wanted)) for column in columns}
    usual = [
        Kind(kind, column)
        for kind, names in (("chat", _CHAT), ("tokens", _TOKENS), ("text", _TEXT))
        for column in names
        if kinds.get(column) == kind
    ]
    others = [Kind(kind, column) for column, kind in kinds.items() if kind and Kind(kind, column) not in usual]
    return usual + (others if len(others) == 1 or len(columns) == 1 else [])


def _values(records: Sequence[Mapping[str, Any]], column: str, wanted: str) -> list[Any]:
    """What a column holds. Where its name or the source's kind says chat, strings of JSON are the messages in them."""
    values = [record[column] for record in records if column in record]
    if wanted != "chat" and (wanted != "auto" or column not in _CHAT):
        return values
    written = [items for value in values if (items := json_list(value)) and isinstance(items[0], Mapping)]
    return written or values


def _kind_of(values: Sequence[Any]) -> str | None:
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


@dataclass(frozen=True, slots=True)
class Encoder:
    """Records of one source to tokens. `chat` is there when the kind is."""

    kind: Kind
    tokenizer: Any
    labels: str | None = None
    chat: ChatEncoder | None = None

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> list[Encoded | RowError]:
        """One answer a record: tokens, or why it is no document."""
        if self.kind.name == "text":
            return self._texts(records)
        return [self._try(record) for record in records]

    def _try(self, record: Mapping[str, Any]) -> Encoded | RowError:
        try:
            if self.chat is None:
                return self._tokens(record)
            return Encoded(*self.chat(self._value(record), record.get("tools")))
        except RowError as error:
            return error

    def _value(self, record: Mapping[str, Any]) -> Any:
        value = record.get(self.kind.column)
        if value is None:
            raise RowError(f"no {self.kind.column!r}, only {_names(list(record))}")
        if not isinstance(value, bytes):
            return value
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise RowError(f"{self.kind.column!r} is bytes that are not UTF-8 (byte {error.start})") from None

    def _texts(self, records: Sequence[Mapping[str, Any]]) -> list[Encoded | RowError]:
        answers: list[Encoded | RowError] = [self._text(record) for record in records]  # type: ignore[misc]
        good = [place for place, answer in enumerate(answers) if isinstance(answer, str)]
        if good:
            texts = [answers[place] for place in good]
            found = self.tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
            for place, ids in zip(good, found, strict=True):
                answers[place] = self._ended(ids)
        return answers

    def _text(self, record: Mapping[str, Any]) -> str | RowError:
        try:
            value = self._value(record)
            if not isinstance(value, str):
                raise RowError(f"{self.kind.column!r} is a {type(value).__name__}, text is needed")
            if not value.strip():
                raise RowError(f"{self.kind.column!r} is empty")
            return encodable(value)
        except RowError as error:
            return error

    def _ended(self, ids: list[int]) -> Encoded:
        end = self.tokenizer.eos_token_id
        return Encoded(np.array(ids if ids and ids[-1] == end else [*ids, end], np.int64), None)

    def _tokens(self, record: Mapping[str, Any]) -> Encoded:
        ids = _numbers(self._value(record), self.kind.column)
        if not len(ids):
            raise RowError(f"{self.kind.column!r} is empty")
        real = _real(record.get(_MASK), len(ids))
        self._check_known(ids[real])
        column = self.labels or "labels"
        if record.get(column) is None:
            if self.labels is not None:
                raise RowError(f"no {column!r}, only {_names(list(record))}")
            return Encoded(ids[real], None)
        return Encoded(ids[real], _learned(ids, _numbers(record[column], column), real, column)[real])

    def _check_known(self, ids: NDArray[np.int64]) -> None:
        most = len(self.tokenizer)
        if ids.min() < 0 or ids.max() >= most:
            bad = int(ids.min() if ids.min() < 0 else ids.max())
            raise RowError(f"{self.kind.column!r} has the id {bad}: this tokenizer's are 0 to {most - 1}")


def _numbers(value: Any, column: str, kinds: str = "iu") -> NDArray[np.int64]:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.zeros((0, 0))
    if array.ndim == 1 and not len(array):
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise RowError(f"{column!r} is no list of whole numbers")
    return array.astype(np.int64)


def _real(mask: Any, count: int) -> NDArray[np.bool_]:
    """Which of `count` tokens are no padding, by the row's mask; all where it has none."""
    if mask is None:
        return np.ones(count, bool)
    real = _numbers(mask, _MASK, "iub") != 0
    if len(real) != count:
        raise RowError(f"{_MASK!r} has {len(real)} entries for {count} tokens")
    if not real.any():
        raise RowError(f"{_MASK!r} leaves no token")
    return real


def _learned(
    ids: NDArray[np.int64], labels: NDArray[np.int64], real: NDArray[np.bool_], column: str
) -> NDArray[np.bool_]:
    """Labels say which tokens are learned: each is its own token's id or -100. Shifted ones are caught here."""
    if len(labels) != len(ids):
        raise RowError(f"{column!r} has {len(labels)} entries for {len(ids)} tokens")
    learn = real & (labels != _IGNORE)
    wrong = np.flatnonzero(learn & (labels != ids))
    if len(wrong):
        at = int(wrong[0])
        raise RowError(
            f"{column!r}[{at}] is {labels[at]} where the token is {ids[at]}: a label is -100 or its own token, not shifted"
        )
    return learn


def make_encoder(kind: Kind, tokenizer: Any, source: Source, template: str | None, learn: str) -> Encoder:
    """The encoder for a kind of documents; what the tokenizer lacks for it is a DataError here, not later."""
    if kind.name == "text" and tokenizer.eos_token_id is None:
        raise DataError("this tokenizer has no EOS token to end documents with: name another in model.tokenizer")
    chat = ChatEncoder.make(tokenizer, template, learn) if kind.name == "chat" else None
    return Encoder(kind, tokenizer, source.labels, chat)
