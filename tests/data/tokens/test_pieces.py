"""Tests of long texts in pieces: the tokens of the whole, for tokenizers of many kinds, or a refusal."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ithaca.data.tokens import pieces
from ithaca.data.tokens.pieces import PieceTokenizer
from ithaca.errors import RowError
from ithaca.models.files.embedded import embedded_tokenizer
from tests.data.kinds import CORPUS, CUT, UNCUT
from tests.data.templates import style_tokenizer

WORDS = [
    *"".join(CORPUS[:2]).split(" "),
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "<mask>",
    "EOX",
    "EOX ",
    "the end",
    "</s>",
]
WORDS += [
    "<|im_end|>",
    "a<s>b",
    "''",
    "it's",
    "x" * 9,
    "4" * 7,
    "中文。",
    "\u00a0",
    "e\u0301",
    "\ufb01",
    "\uff21\uff22",
    "<s",
]


def long_text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice(["", " ", " ", " ", "\n"]) for _ in range(words))


@pytest.mark.few(8)
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("kind", [*CUT, "embedded"])
def test_pieces_have_the_tokens_of_the_whole_text(kind: str, as_text: bool) -> None:
    tokenizer = embedded_tokenizer() if kind == "embedded" else CUT[kind]()
    cutter = PieceTokenizer.of(tokenizer, as_text)
    assert " " in cutter.after
    for seed in range(12):
        text = long_text(seed, 400)
        whole = tokenizer(text, split_special_tokens=as_text)["input_ids"]
        cuts = list(cutter._cuts(text, 64))
        assert len(cuts) > 15
        assert cutter.encode(text, piece=64).tolist() == whole, (kind, seed)
        # A text that begins or ends in blanks, and one that is shorter than a piece.
        assert (
            cutter.encode(f"  {text}  ", piece=200).tolist()
            == tokenizer(f"  {text}  ", split_special_tokens=as_text)["input_ids"]
        )
        assert cutter.encode(text[:50]).tolist() == tokenizer(text[:50], split_special_tokens=as_text)["input_ids"]


@pytest.mark.parametrize("kind", [*UNCUT, "a style of chat"])
def test_tokenizer_without_boundaries_takes_texts_whole_or_refuses(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = style_tokenizer("qwen") if kind == "a style of chat" else UNCUT[kind]()
    cutter = PieceTokenizer.of(tokenizer, False)
    # Marks that no merge of it has would do; this text has none of them.
    assert " " not in cutter.after
    text = "the word of " * 150
    assert cutter.encode(text, piece=64).tolist() == tokenizer(text)["input_ids"]
    monkeypatch.setattr(pieces, "LONGEST", 500)
    with pytest.raises(
        RowError, match=r"no place where this tokenizer's tokens can be cut.*split the document into several"
    ):
        cutter.encode(text, piece=64)


def test_long_text_without_boundaries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = CUT["gpt2"]()
    cutter = PieceTokenizer.of(tokenizer, False)
    text = "acgt" * 1000
    assert cutter.encode(text, piece=64).tolist() == tokenizer(text)["input_ids"]
    monkeypatch.setattr(pieces, "LONGEST", 2000)
    with pytest.raises(RowError, match="4,000 letters"):
        cutter.encode(text, piece=64)


def test_cuts_at_any_letter_change_tokens() -> None:
    """Cuts that ignore the boundaries change the tokens of nearly every text."""
    tokenizer = CUT["llama3"]()
    cutter = PieceTokenizer.of(tokenizer, False)
    text = long_text(1, 300)
    pieces_of = [text[start : start + 64] for start in range(0, len(text), 64)]
    joined = np.concatenate([np.array(cutter.ids(piece), int) for piece in pieces_of])
    assert joined.tolist() != tokenizer(text)["input_ids"]


def test_progress_within_a_document_adds_up() -> None:
    cutter = PieceTokenizer.of(CUT["gpt2"](), False)
    text = long_text(2, 300)
    steps: list[int] = []
    cutter.encode(text, piece=64, progress=steps.append)
    assert len(steps) > 10
    assert sum(steps) == len(text)
