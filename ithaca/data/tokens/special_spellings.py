"""Spellings of special tokens inside documents: `</s>` or `<|im_end|>` typed by somebody, not set by a template.

A tokenizer turns such a spelling into the token, which would end a message's turn or begin one that nobody wrote. So
each spelling in a message is broken by a private-use letter before the template is rendered; special tokens in the
rendered text are then the template's own:

    message   a </s> b        ->  a <|/s> b            (| stands for the letter)
    rendered  [INST] a <|/s> b [/INST] c</s>
    encoded   [INST] a </s> b [/INST] c(2)             (2 is the token; the first </s> is text)

For the last step a copy of the tokenizer takes the usual spellings as text and has a private spelling for each token.

Invariant: exact or refused. Without the letters the rendered text is that of the messages themselves; the copy gives the
tokenizer's own tokens for the text with the letters in it; no special token comes from a message.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from ithaca.data.tokens.chat_messages import Message
from ithaca.errors import RowError

BREAK = "\ue0f4"
# Messages and tools with broken spellings.
Broken = tuple[list[Message], Any]
_FIRST, _LAST = "\ue0f2", "\ue0f3"
# A template that searches a message for a token, as Qwen's do for </think>, expects the message to hold it.
_LOOKS = r"(?:(?:split|startswith|endswith|replace|find|index|count)\(\s*['\"]{0}['\"]|['\"]{0}['\"]\s+(?:not\s+)?in\b)"


def special_tokens(tokenizer: Any) -> set[str]:
    """Return the spellings of all special tokens."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {*tokenizer.all_special_tokens, *added}


def _matcher(tokens: Iterable[str]) -> re.Pattern[str]:
    longest = sorted((token for token in tokens if len(token) > 1), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


@dataclass(frozen=True)
class Spellings:
    """Special tokens of a tokenizer: all (`tokens`), and those that the template does not read in messages (`strict`).

    Tokens of one letter cannot be broken and are left to the tokenizer.
    """

    tokens: re.Pattern[str]
    strict: re.Pattern[str]
    ends: tuple[str, ...] = field(repr=False)
    begins: tuple[str, ...] = field(repr=False)

    @classmethod
    def of(cls, tokenizer: Any, template: str = "", marks: str = "") -> Spellings:
        """Read the special tokens. `marks`: the template's own marks of a turn, which count as not read in messages."""
        tokens = special_tokens(tokenizer)
        read = {
            token
            for token in tokens
            if token not in marks and re.search(_LOOKS.replace("{0}", re.escape(token)), template)
        }
        long = sorted(token for token in tokens if len(token) > 1)
        # Parts of special tokens: a message and the template's text around it may complete each other to a token.
        ends = {token[at:] for token in long for at in range(1, len(token))}
        begins = {token[:at] for token in long for at in range(1, len(token))}
        return cls(_matcher(tokens), _matcher(tokens - read), tuple(sorted(ends)), tuple(sorted(begins)))

    def broken(self, messages: Sequence[Message], tools: Any) -> Broken | None:
        """Return messages and tools with every spelling broken; None if there is none."""
        changed = [self._message(message) for message in messages]
        other = self._value(tools, self.tokens)
        if changed == list(messages) and other == tools:
            return None
        return changed, other

    def has_equal_tokens(self, plain: str, text: str) -> bool:
        """True if special tokens stand at the same letters with and without broken spellings: none is a message's."""
        if BREAK in plain or text.replace(BREAK, "") != plain:
            return False
        shift = [found.start() for found in re.finditer(BREAK, text)]
        kept = [(at.start() - bisect_left(shift, at.start()), at[0]) for at in self.tokens.finditer(text)]
        return kept == [(at.start(), at[0]) for at in self.tokens.finditer(plain)]

    def _message(self, message: Message) -> Message:
        if self.tokens.search(message["role"]):
            raise RowError(f"a message's role {message['role']!r} holds a special token")
        pattern = self.tokens if message["role"] != "assistant" else self.strict
        changed = {key: self._value(value, pattern) for key, value in message.items() if key != "role"}
        content = self._apart(message["content"], pattern) if message["content"] else ""
        return message | changed | {"content": content}

    def _value(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return _broken(value, pattern)
        if isinstance(value, dict):
            return {_broken(key, pattern): self._value(inner, pattern) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(inner, pattern) for inner in value]
        return value

    def _apart(self, text: str, pattern: re.Pattern[str]) -> str:
        """Return the text broken, and separated from the template's text if both together could spell a token."""
        core = text.strip()
        first = core.startswith(self.ends) or any(core in token for token in self.ends)
        last = core.endswith(self.begins)
        if not core or not (first or last):
            return _broken(text, pattern)
        start = text.find(core)
        before, after = text[:start], text[start + len(core) :]
        return f"{before}{BREAK if first else ''}{_broken(core, pattern)}{BREAK if last else ''}{after}"


def _broken(text: Any, pattern: re.Pattern[str]) -> Any:
    """Return the text with a letter inserted into each spelling, after its first letter."""
    if not isinstance(text, str):
        return text
    while pattern.search(text):
        text = pattern.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)
    return text


@dataclass(frozen=True, slots=True)
class PlainTokenizer:
    """Tokenizer to which the usual spellings of special tokens are text, and private spellings are the tokens."""

    inner: Tokenizer
    ids: dict[int, int]
    private: dict[str, str]
    special: NDArray[np.int64]

    @classmethod
    def of(cls, tokenizer: Any) -> PlainTokenizer:
        inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        inner.no_padding()
        inner.no_truncation()
        # In the copy a special token's spelling is plain text.
        inner.encode_special_tokens = True
        known = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        private = {str(token): f"{_FIRST}{number}{_LAST}" for number, token in known.items()}
        if inner.normalizer is not None and any(token.normalized for token in known.values()):
            sample = f"{_FIRST}0{_LAST}"
            if sample not in inner.normalizer.normalize_str(sample):
                raise RowError("a message holds the spelling of a special token, which this tokenizer normalizes away")
        inner.add_tokens([_renamed(token, private[str(token)]) for token in known.values()])
        ids = {int(inner.token_to_id(private[str(token)]) or 0): number for number, token in known.items()}
        unknown = tokenizer.unk_token_id
        special = np.array(sorted(number for number in known if number != unknown), np.int64)
        return cls(inner, ids, private, special)

    def encode(self, text: str, spellings: Spellings) -> PlainEncoding:
        """Return the tokens of a rendered text with broken spellings.

        RowError if the tokenizer makes a special token of plain text, or reads the text differently with the letters.
        """
        written, moves = self._rewrite(text, spellings, keep=False)
        found = self.inner.encode(written, add_special_tokens=False)
        return PlainEncoding(self._checked(found.ids), found, written, moves)

    def agrees(self, text: str, spellings: Spellings, ids: Sequence[int]) -> bool:
        """True if the copy gives these tokens for the text, letters included."""
        written, _ = self._rewrite(text, spellings, keep=True)
        return bool(self._checked(self.inner.encode(written, add_special_tokens=False).ids).tolist() == list(ids))

    def _checked(self, ids: Sequence[int]) -> NDArray[np.int64]:
        given = np.array(ids, np.int64)
        if np.isin(given, self.special).any():
            raise RowError("a message holds the spelling of a special token that this tokenizer cannot take as text")
        mapped = given.copy()
        for ours, theirs in self.ids.items():
            mapped[given == ours] = theirs
        return mapped

    def _rewrite(self, text: str, spellings: Spellings, *, keep: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text with private spellings, and each letter where its length changed, with the shift after it."""
        parts, moves, at, moved = [], [], 0, 0
        either = re.compile(f"{spellings.tokens.pattern}|{BREAK}")
        for found in either.finditer(text):
            new = found[0] if keep and found[0] == BREAK else self.private.get(found[0], "")
            if found[0] != BREAK and not new:
                new = found[0]
            parts += [text[at : found.start()], new]
            at = found.end()
            moved += len(new) - len(found[0])
            moves.append((found.start(), moved))
        return "".join([*parts, text[at:]]), moves


def _renamed(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


@dataclass(frozen=True, slots=True)
class PlainEncoding:
    """Tokens of a rewritten text. `position` maps a letter of the given text to the rewritten one."""

    ids: NDArray[np.int64]
    found: Any
    text: str
    moves: list[tuple[int, int]]

    def position(self, letter: int) -> int:
        before = bisect_left(self.moves, (letter, -(1 << 62)))
        return letter + (self.moves[before - 1][1] if before else 0)


# Cached: a copy takes seconds and as much memory as the tokenizer.
plain_tokenizer: Callable[[Any], PlainTokenizer] = lru_cache(maxsize=2)(PlainTokenizer.of)
