"""Long texts tokenized in pieces, so that memory follows the piece and not the document.

    text    ...the quick| brown fox| jumps over...        cut after a letter, before a blank or a mark
    pieces  "...the quick", "a brown fox" - "a", ...      a letter before each further piece; its tokens are dropped

A tokenizer needs about a hundred bytes for each letter of its input: 22 GB for a document of 200 MB. The tokens of the
pieces are those of the text if each cut stands at a boundary that the tokenizer always has:

- between a letter and the blank or mark after it, if the pre-tokenizer always ends a word there;
- for tokenizers without words (the first Llama's), if no token of the vocabulary has a letter before that blank or
  mark, so that no merge can cross it.

The letter before a piece takes what a tokenizer adds to the start of a text or strips from it.

Invariant: exact or refused. Normalizers and pre-tokenizers are of kinds that read no letter before a boundary; the
boundary is tried on random contexts beforehand, and every cut on its own context.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ithaca.errors import RowError

# Letters of a piece, and of the longest text that a tokenizer without boundaries gets at once.
PIECE = 1 << 20
LONGEST = 1 << 25
_ANCHOR = "a"
_AFTER = " \n\t\r,.;:!?()\uff0c\u3002\u3001\uff1b\uff1a\uff1f\uff01"
_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03a3-\u03c9\u0410-\u044f\u05d0-\u05ea\u0621-\u063a"
    "\u0641-\u064a\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_BLANK = frozenset(" \n\t\r\u2581\u0120\u010a\u0109\u010d")
_NORMALIZERS = frozenset(
    [
        "Sequence",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Lowercase",
        "Strip",
        "StripAccents",
        "Prepend",
        "Replace",
        "BertNormalizer",
        "Nmt",
        "Precompiled",
        "ByteLevel",
    ]
)
_SPLITTERS = frozenset(
    [
        "Sequence",
        "ByteLevel",
        "Split",
        "Metaspace",
        "Whitespace",
        "WhitespaceSplit",
        "BertPreTokenizer",
        "Punctuation",
        "Digits",
        "CharDelimiterSplit",
    ]
)
_LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[bBAGKzZ]|\^")
_CONTEXT = 96
_TRIALS = 24
_WORDS = "it's don't We'LL THE word Ärger слово 中文 かな 한국 x1 42 3.14 e\u0301 ... -- _a_ <b> \U0001f600 \u00a0 I"


@dataclass(frozen=True, slots=True)
class PieceTokenizer:
    """Tokenizer that cuts long texts after a letter, before a letter of `after`; nowhere if `after` is empty.

    `before`, `behind`: ids that the tokenizer adds around a text.
    """

    tokenizer: Any
    as_text: bool
    after: str
    before: list[int]
    behind: list[int]
    added: re.Pattern[str]
    widest: int
    largest: int

    @classmethod
    def of(cls, tokenizer: Any, as_text: bool) -> PieceTokenizer:
        """Find the boundaries of a tokenizer."""
        largest = max(tokenizer.get_vocab().values())
        blank = cls(tokenizer, as_text, "", [], [], re.compile("(?!)"), 0, largest)
        whole, bare = list(tokenizer(_ANCHOR, verbose=False)["input_ids"]), blank.ids(_ANCHOR)
        at = next((at for at in range(len(whole)) if bare and whole[at : at + len(bare)] == bare), None)
        if at is None:
            return blank
        names = sorted(
            (str(token) for token in tokenizer.added_tokens_decoder.values() if str(token)), key=len, reverse=True
        )
        added = re.compile("|".join(map(re.escape, names)) or "(?!)", re.IGNORECASE)
        widest = max(map(len, names), default=0)
        around = whole[:at], whole[at + len(bare) :]
        return cls(tokenizer, as_text, _boundaries(tokenizer), *around, added, widest, largest)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that the tokenizer adds."""
        more = {"split_special_tokens": True} if self.as_text else {}
        found = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False, **more)
        ids: list[int] = found["input_ids"]
        return ids

    def encode(self, text: str, piece: int = PIECE, progress: Callable[[int], None] | None = None) -> NDArray[Any]:
        """Return the tokens of the whole text, with those that the tokenizer adds before and after it."""
        # Ids may have gaps: the largest id counts, not the number of tokens.
        dtype = np.uint16 if self.largest < 1 << 16 else np.uint32
        parts = [np.array(self.before, dtype)]
        start = 0
        for end in self._cuts(text, piece):
            ids = self.ids(text[start:end]) if not start else self._ids_inside_text(text[start:end])
            if ids is None:
                raise RowError(_no_cut_message(len(text)))
            parts.append(np.array(ids, dtype))
            if progress is not None:
                progress(end - start)
            start = end
        return np.concatenate([*parts, np.array(self.behind, dtype)])

    def _cuts(self, text: str, piece: int) -> Iterator[int]:
        start = 0
        while len(text) - start > piece:
            size = piece
            while (cut := self._cut(text, start, start + size)) is None:
                # No boundary in the second half: take a longer piece.
                size *= 2
                if size > max(LONGEST, piece):
                    raise RowError(_no_cut_message(len(text)))
                if len(text) - start <= size:
                    break
            if cut is None:
                break
            yield cut
            start = cut
        yield len(text)

    def _cut(self, text: str, start: int, end: int) -> int | None:
        """Return the last safe cut in the second half of text[start:end]; None if there is none."""
        if not self.after:
            return None
        pattern = re.compile(f"(?<=[{_LETTERS}])[{re.escape(self.after)}]")
        width = 256
        middle = (start + end) // 2
        while True:
            low = max(middle, end - width)
            found = [match.start() for match in pattern.finditer(text, low, end)]
            good = (cut for cut in islice(reversed(found), 64) if self._is_boundary(text, cut))
            if (cut := next(good, None)) is not None:
                return cut
            if low == middle:
                return None
            # Look further back: text without a blank, such as Chinese, has its marks far apart.
            width *= 8

    def _is_boundary(self, text: str, cut: int) -> bool:
        """True if no added token is near, and the tokens around the cut are those of its two sides."""
        around = text[max(0, cut - self.widest - 1) : cut + self.widest + 1]
        at = cut - max(0, cut - self.widest - 1)
        if any(found.start() <= at and found.end() >= at for found in self.added.finditer(around)):
            return False
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        if normalizer is not None and self.added.search(normalizer.normalize_str(around)):
            return False
        left, right = text[max(0, cut - _CONTEXT) : cut], text[cut : cut + _CONTEXT]
        behind = self._ids_inside_text(right)
        return behind is not None and self.ids(left + right) == self.ids(left) + behind

    def _ids_inside_text(self, text: str) -> list[int] | None:
        """Return the tokens of a text that follows another; None if the first letter's tokens change."""
        first = self.ids(_ANCHOR)
        ids = self.ids(_ANCHOR + text)
        return ids[len(first) :] if ids[: len(first)] == first else None


def _no_cut_message(letters: int) -> str:
    return (
        f"{letters:,} letters, and in {LONGEST:,} of them no place where this tokenizer's tokens can be cut for certain: "
        f"split the document into several of at most {LONGEST:,} letters"
    )


@lru_cache(maxsize=4)
def piece_tokenizer(tokenizer: Any, as_text: bool) -> PieceTokenizer:
    """Return the piece tokenizer of a tokenizer; cached, since finding the boundaries takes a moment."""
    return PieceTokenizer.of(tokenizer, as_text)


def _boundaries(tokenizer: Any) -> str:
    """Return the blanks and marks before which a text can be cut after a letter."""
    inner = tokenizer.backend_tokenizer
    facts = json.loads(inner.to_str())
    if not _memoryless(facts["normalizer"], _NORMALIZERS) or not _memoryless(facts["pre_tokenizer"], _SPLITTERS):
        return ""
    # BPE dropout draws merges at random: no two encodings agree.
    if facts["model"].get("dropout"):
        return ""
    after = [mark for mark in _AFTER if _always(inner, mark, _split)]
    if after or facts["model"]["type"] != "BPE" or not _may_be_whole(facts["model"]):
        return "".join(after)
    return "".join(
        mark
        for mark in _AFTER
        if _always(inner, mark, _normalize) and _is_never_merged(tokenizer, facts["model"], mark)
    )


def _memoryless(part: Any, known: frozenset[str]) -> bool:
    """True if a part of the pipeline is of a known kind whose patterns read no letter before their match."""
    if part is None:
        return True
    if part["type"] not in known:
        return False
    inner = part.get("normalizers") or part.get("pretokenizers") or []
    pattern = part.get("pattern") or {}
    looks = _LOOKS_BACK.search(pattern.get("Regex", "").replace("[^", "["))
    return looks is None and all(_memoryless(each, known) for each in inner)


def _may_be_whole(model: dict[str, Any]) -> bool:
    return not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")


def _normalize(inner: Any, text: str) -> list[str]:
    return list(text if inner.normalizer is None else inner.normalizer.normalize_str(text))


def _split(inner: Any, text: str) -> list[str]:
    """Return the pre-tokenizer's words of a text; without a pre-tokenizer the text as one word."""
    text = "".join(_normalize(inner, text))
    if inner.pre_tokenizer is None:
        return [text]
    return [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(text)]


def _always(inner: Any, mark: str, parts_of: Callable[[Any, str], list[str]]) -> bool:
    """True if in random contexts the parts of a text are those of its two sides, cut before the mark."""
    rng = random.Random(f"{mark!r}")
    words = [*_WORDS.split(" "), " ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", ",", ". ", "'s", "''"]
    first = parts_of(inner, _ANCHOR)
    for trial in range(_TRIALS):
        left = "".join(rng.choice(words) for _ in range(trial % 7)) + rng.choice("azZéßЖя中の한")
        right = mark + "".join(rng.choice(words) for _ in range(rng.randrange(7)))
        behind = parts_of(inner, _ANCHOR + right)
        if (
            behind[: len(first)] != first
            or parts_of(inner, left + right) != parts_of(inner, left) + behind[len(first) :]
        ):
            return False
    return True


def _is_never_merged(tokenizer: Any, model: dict[str, Any], mark: str) -> bool:
    """True if tokens that hold the mark have only blanks before it, so that no merge joins the mark to a letter."""
    inner = tokenizer.backend_tokenizer
    first = "".join(_split(inner, _ANCHOR))
    written = "".join(_split(inner, _ANCHOR + mark + _ANCHOR))[len(first) :]
    unknown = tokenizer.unk_token_id
    bare = tokenizer(_ANCHOR + mark + _ANCHOR, add_special_tokens=False, verbose=False)["input_ids"]
    if not written or (unknown is not None and unknown in bare):
        return False
    letter = written[0]
    return not any(_joins(token, letter) for token in model["vocab"])


def _joins(token: str, letter: str) -> bool:
    return any(here == letter and before not in _BLANK for before, here in pairwise(token))
