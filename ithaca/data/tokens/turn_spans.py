"""The assistant's turns in a rendered conversation, and the tokens that belong to them.

    rendered   <user>q<end><assistant>Hello<end><user>...
    hidden     <user>q<end><assistant>~1~<end><user>...       contents replaced by a sign that occurs nowhere
    fixed      ------------------|    |---------------        parts that do not depend on the assistant
    learned                       Hello<end>                  what lies between, the end of the turn included

Invariant: exact or refused. A conversation whose fixed parts do not line up, or whose contents are not in the spans, is a
RowError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ithaca.data.tokens.chat_messages import Message, Span
from ithaca.errors import RowError

# Private-use letters: no document has them by accident, and one that does is refused.
OPEN, CLOSE = "\ue0f0", "\ue0f1"


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """Texts before and after every assistant's turn, the same in all conversations of a template."""

    opening: str
    closing: str


def generation_mask(spans: Sequence[Span], count: int, token_of: Any) -> NDArray[np.bool_]:
    """Return the tokens of `{% generation %}` blocks, as transformers' apply_chat_template marks them."""
    learn = np.zeros(count, bool)
    for start, end in spans:
        if end < 1:
            raise RowError("the chat template begins with an empty generation")
        first, last = token_of(start), token_of(end - 1)
        if first is None:
            # transformers stops here as well.
            break
        learn[first : last + 1 if last else count] = True
    return learn


def find_spans(marks: TurnMarks, hidden: Sequence[Message], blank: str, text: str) -> list[Span]:
    """Return the letters of `text` that the assistant says, from each turn's opening to the end of its closing.

    `blank`: text of the `hidden` messages.
    """
    if OPEN in text or CLOSE in text:
        raise RowError("the text has the private-use letters U+E0F0 or U+E0F1: take them out")
    parts = _fixed_parts(marks, hidden, blank)
    if not text.startswith(parts[0]):
        raise RowError("the chat template renders what comes before the assistant differently by what it says")
    spans: list[Span] = []
    start = len(parts[0])
    for part in parts[1:]:
        end = text.find(part, start)
        if end < 0:
            raise RowError("the chat template renders what comes after the assistant differently by what it says")
        spans.append((start, end + len(marks.closing)))
        start = end + len(part)
    if start != len(text) or any(marks.closing in text[a : b - len(marks.closing)] for a, b in spans):
        raise RowError(
            f"a message holds the template's own mark {marks.closing!r}: it cannot be told from the turn's end"
        )
    return spans


def hide_contents(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each of the assistant's contents replaced by a sign of its own."""
    return [
        {**message, "content": f"{OPEN}{number}{CLOSE}"} if message["role"] == "assistant" else message
        for number, message in enumerate(messages)
    ]


def _fixed_parts(marks: TurnMarks, hidden: Sequence[Message], text: str) -> list[str]:
    """Return the parts of a text that do not depend on the assistant.

    Each part but the first begins with a closing; each part but the last ends with an opening.
    """
    parts, start = [], 0
    for message in hidden:
        if message["role"] != "assistant":
            continue
        at = text.find(message["content"], start)
        opening = text.rfind(marks.opening, start, at)
        closing = text.find(marks.closing, at)
        if min(at, opening, closing) < 0:
            raise RowError("the chat template leaves an assistant's message out, or sets it between other marks")
        parts.append(text[start : opening + len(marks.opening)])
        start = closing
    return [*parts, text[start:]]


def tokens_in(spans: Sequence[Span], offsets: Sequence[Span], text: str) -> NDArray[np.bool_]:
    """Return the tokens with a letter in a span, and only blanks before the span.

    A token that holds a part of the prompt is not the assistant's. A blank that a tokenizer leaves out of its offsets
    belongs to the next token.
    """
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    before = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]])
    starts = np.minimum(starts, before)
    learn = np.zeros(len(ends), bool)
    for start, end in spans:
        inside = (starts < end) & (ends > start)
        for at in np.flatnonzero(inside & (starts < start)).tolist():
            inside[at] = not text[starts[at] : start].strip()
        learn |= inside
    return learn


def masked_texts(text: str, learn: NDArray[np.bool_], offsets: Sequence[Span]) -> list[str]:
    """Return the stretches of text that a mask covers."""
    texts: list[str] = []
    last, until = -1, 0
    for at in np.flatnonzero(learn).tolist():
        start, end = offsets[at]
        if at == last + 1 and texts:
            texts[-1] += text[max(start, until) : end]
        else:
            texts.append(text[start:end])
        last, until = at, end
    return texts


def check_contents(messages: Sequence[Message], texts: Sequence[str]) -> None:
    """Refuse a conversation if an assistant's visible content is not, in order, in the learned stretches."""
    stretch, at = 0, 0
    for message in messages:
        if message["role"] != "assistant" or not isinstance(message["content"], str):
            continue
        # Templates may drop thinking and trim blanks; the visible answer must stay.
        content = message["content"].rpartition("</think>")[2].strip()
        while stretch < len(texts) and (found := texts[stretch].find(content, at)) < 0:
            stretch, at = stretch + 1, 0
        if stretch == len(texts):
            raise RowError("the chat template changes what the assistant says: its tokens cannot be told")
        at = found + len(content)
