"""Records to tokens: plain text, chat messages, prompts with their completions, or ready token ids.

The spelling of a special token in plain text becomes that token, as in the tokenizer, unless the run keeps it as text.

Invariant: a plain document ends with EOS, and begins with BOS if the tokenizer adds it. Padding of ready token ids is
dropped by the record's mask. A record that is no document gets a RowError and changes no other record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ithaca.config.schema import DataSettings, SourceSettings
from ithaca.constants import IGNORE_INDEX
from ithaca.data.sources.read_records import Unreadable, encodable
from ithaca.data.tokens.chat import ChatEncoder
from ithaca.data.tokens.document_kinds import DocumentKind, quoted_names
from ithaca.data.tokens.pairs import ALPACA, INPUT, PAIR, encode_alpaca, encode_pair
from ithaca.data.tokens.pieces import PIECE, piece_tokenizer
from ithaca.data.tokens.special_spellings import Spellings
from ithaca.errors import DataError, RowError

_MASK = "attention_mask"
_TOOLS = "tools"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a document. `learn`: loss mask, None for all. `spelled`: True if a special token is spelled in it."""

    ids: NDArray[Any]
    learn: NDArray[np.bool_] | None
    spelled: bool = False

    @property
    def targets(self) -> int:
        """Number of tokens in the loss; nothing predicts the first."""
        return len(self.ids[1:]) if self.learn is None else int(self.learn[1:].sum())


@dataclass(frozen=True)
class Encoder:
    """Encoder of one source's records. `chat`: None for other kinds. `as_text`: special tokens' spellings stay text."""

    kind: DocumentKind
    tokenizer: Any
    labels: str | None = None
    chat: ChatEncoder | None = None
    as_text: bool = False
    learn_all: bool = False

    def __call__(
        self, records: Sequence[Mapping[str, Any]], progress: Callable[[int], None] | None = None
    ) -> list[Encoded | RowError]:
        """Return tokens or an error for each record. `progress` gets the letters done within a long document."""
        if self.kind.name == "text":
            return self._texts(records, progress)
        return [self._try(record) for record in records]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read."""
        more = {
            "tokens": (_MASK, self.labels or "labels"),
            "chat": (_TOOLS,),
            "chat pair": (*PAIR, _TOOLS),
            "pair": PAIR,
            "alpaca": (*ALPACA, INPUT),
        }
        return tuple(dict.fromkeys((self.kind.column, *more.get(self.kind.name, ()))))

    def _try(self, record: Mapping[str, Any]) -> Encoded | RowError:
        try:
            for column in self.columns:
                if isinstance(cell := record.get(column), Unreadable):
                    raise RowError(f"{column!r} {cell.reason}")
            return self._encode(record)
        except RowError as error:
            return error

    def _encode(self, record: Mapping[str, Any]) -> Encoded:
        if self.kind.name == "tokens":
            return self._tokens(record)
        if self.chat is not None:
            tools = record.get(_TOOLS)
            if self.kind.name == "chat":
                return Encoded(*self.chat.encode(self._value(record), tools))
            return Encoded(*self.chat.completion(self._value(record), self._value(record, PAIR[1]), tools))
        read = encode_pair if self.kind.name == "pair" else encode_alpaca
        texts = {column: self._value(record, column) for column in self.columns if record.get(column) is not None}
        ids, learn = read(texts, self.tokenizer, self._one)
        spelled = any(isinstance(text, str) and self._spellings.tokens.search(text) for text in texts.values())
        return Encoded(ids, None if self.learn_all else learn, spelled)

    def _one(self, text: str) -> list[int]:
        ids = self._all_ids([encodable(text)])[0]
        if isinstance(ids, RowError):
            raise ids
        if self.as_text:
            self._spelled(np.array(ids, np.int64), text)
        return ids

    def _value(self, record: Mapping[str, Any], column: str = "") -> Any:
        column = column or self.kind.column
        value = record.get(column)
        if isinstance(value, Unreadable):
            raise RowError(f"{column!r} {value.reason}")
        if value is None and column in record:
            raise RowError(f"{column!r} is null")
        if value is None:
            raise RowError(f"no {column!r}, only {quoted_names(list(record))}")
        if not isinstance(value, bytes):
            return value
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise RowError(f"{column!r} is bytes that are not UTF-8 (byte {error.start})") from None

    def _texts(
        self, records: Sequence[Mapping[str, Any]], progress: Callable[[int], None] | None
    ) -> list[Encoded | RowError]:
        answers: list[Any] = [self._text(record) for record in records]
        # Short texts go to the tokenizer together: its threads share them.
        short = [at for at, text in enumerate(answers) if isinstance(text, str) and len(text) <= PIECE]
        for at, ids in zip(short, self._all_ids([answers[at] for at in short]), strict=True):
            answers[at] = ids if isinstance(ids, RowError) else self._with_eos(np.array(ids, np.int64), answers[at])
        for at, text in enumerate(answers):
            if isinstance(text, str):
                answers[at] = self._long(text, progress)
        return answers

    def _long(self, text: str, progress: Callable[[int], None] | None) -> Encoded | RowError:
        try:
            return self._with_eos(piece_tokenizer(self.tokenizer, self.as_text).encode(text, progress=progress), text)
        except RowError as error:
            return error
        except Exception as error:
            return _tokenizer_refuses(error)

    def _text(self, record: Mapping[str, Any]) -> str | RowError:
        try:
            value = self._value(record)
            if not isinstance(value, str):
                raise RowError(f"{self.kind.column!r} is a {type(value).__name__}, text is needed")
            if not value or value.isspace():
                raise RowError(f"{self.kind.column!r} is empty")
            return encodable(value)
        except RowError as error:
            return error

    def _all_ids(self, texts: list[str]) -> list[list[int] | RowError]:
        """Return the ids of each text, or the error of a text that the tokenizer refuses."""
        if not texts:
            return []
        try:
            return list(self._ids(texts))
        except Exception:
            # One text fails the whole batch: one by one now, so that the other texts keep their ids.
            answers: list[list[int] | RowError] = []
            for text in texts:
                try:
                    answers += self._ids([text])
                except Exception as error:
                    answers.append(_tokenizer_refuses(error))
            return answers

    def _ids(self, texts: list[str]) -> list[list[int]]:
        more = {"split_special_tokens": True} if self.as_text else {}
        found: list[list[int]] = self.tokenizer(texts, return_attention_mask=False, verbose=False, **more)["input_ids"]
        return found

    def _with_eos(self, ids: NDArray[Any], text: str) -> Encoded | RowError:
        try:
            spelled = self._spelled(ids, text)
        except RowError as error:
            return error
        end = self.tokenizer.eos_token_id
        whole = ids if len(ids) and ids[-1] == end else np.concatenate([ids, np.array([end], ids.dtype)])
        return Encoded(whole, None, spelled)

    def _spelled(self, ids: NDArray[Any], text: str) -> bool:
        """True if a text spells a special token; RowError if the spelling became a token and should be text."""
        more = int(np.isin(ids, self._special).sum()) > self._special_tokens_added
        if more and self.as_text:
            raise RowError("it holds the spelling of a special token that this tokenizer cannot take as text")
        return self._spellings.tokens.search(text) is not None if self.as_text else more

    @cached_property
    def _special(self) -> NDArray[np.int64]:
        known = (number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        return np.array([number for number in known if number != self.tokenizer.unk_token_id], np.int64)

    @cached_property
    def _spellings(self) -> Spellings:
        return Spellings.of(self.tokenizer)

    @cached_property
    def _special_tokens_added(self) -> int:
        """Number of special tokens that the tokenizer adds to a text."""
        ids = self._all_ids(["a"])[0]
        if isinstance(ids, RowError):
            return int(self.tokenizer.num_special_tokens_to_add(pair=False))
        return int(np.isin(ids, self._special).sum())

    def _tokens(self, record: Mapping[str, Any]) -> Encoded:
        ids = _numbers(self._value(record), self.kind.column)
        if not len(ids):
            raise RowError(f"{self.kind.column!r} is empty")
        real = _real(record.get(_MASK), len(ids))
        self._check_known(ids[real])
        column = self.labels or "labels"
        if record.get(column) is None:
            if self.labels is not None:
                raise RowError(f"no {column!r}, only {quoted_names(list(record))}")
            return Encoded(ids[real], None)
        return Encoded(ids[real], _learned(ids, _numbers(record[column], column), real, column)[real])

    def _check_known(self, ids: NDArray[np.int64]) -> None:
        most = len(self.tokenizer)
        if ids.min() < 0 or ids.max() >= most:
            bad = int(ids.min() if ids.min() < 0 else ids.max())
            raise RowError(f"{self.kind.column!r} has the id {bad}: this tokenizer's are 0 to {most - 1}")


def _tokenizer_refuses(error: Exception) -> RowError:
    # The library raises bare exceptions, such as for a word that a vocabulary without an unknown token lacks.
    return RowError(f"the tokenizer does not take it ({' '.join(str(error).split())[:200]})")


def _numbers(value: Any, column: str, kinds: str = "iu") -> NDArray[np.int64]:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, TypeError, RecursionError):
        array = np.zeros((0, 0))
    if array.ndim == 1 and not len(array):
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise RowError(f"{column!r} is no list of whole numbers")
    return array.astype(np.int64)


def _real(mask: Any, count: int) -> NDArray[np.bool_]:
    """Return True for tokens that are no padding, by the row's mask; for all tokens if it has none."""
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
    """Return the loss mask of labels. Each label is its own token's id or -100; shifted labels are refused here."""
    if len(labels) != len(ids):
        raise RowError(f"{column!r} has {len(labels)} entries for {len(ids)} tokens")
    learn = real & (labels != IGNORE_INDEX)
    wrong = np.flatnonzero(learn & (labels != ids))
    if len(wrong):
        at = int(wrong[0])
        raise RowError(
            f"{column!r}[{at}] is {labels[at]} where the token is {ids[at]}: a label is -100 or its own token, not shifted"
        )
    return learn


def make_encoder(
    kind: DocumentKind, tokenizer: Any, source: SourceSettings, data: DataSettings, template: str | None
) -> Encoder:
    """Make the encoder of a kind of documents; refuse a tokenizer that lacks what the kind needs.

    `template`: text of the run's own chat template, None if it has none.
    """
    if kind.name in ("text", "pair", "alpaca") and tokenizer.eos_token_id is None:
        raise DataError("this tokenizer has no EOS token to end documents with: name another in model.tokenizer")
    given = data.chat_template if template != data.chat_template and data.chat_template else ""
    chat = ChatEncoder.make(tokenizer, template, data.learn, given) if kind.name in ("chat", "chat pair") else None
    return Encoder(kind, tokenizer, source.labels, chat, data.special_tokens == "text", data.learn == "all")
