"""Chat messages to tokens with the loss on what the assistant says, its end of turn among it, and nothing else.

A template with `{% generation %}` marks says itself what is learned. For the others the spans are found exactly, by
rendering twice: once as it is, once with every assistant's content replaced by a sign that occurs nowhere. The second
text falls apart into parts that do not depend on what the assistant says; those parts must occur, in order, in the
first one, and what lies between two of them, from the generation prompt to the end of the turn, is the assistant's.
Templates that rewrite history (thinking dropped from earlier turns) or trim contents fit that too.

What a message holds is text: the spelling of a special token in it becomes no token (`spelled.py`), so no message can
end its own turn. Templates are rendered in a process that can be ended (`render.py`).

Invariant: exact or refused. A conversation whose parts do not line up, whose text holds the template's own marks, or
whose contents are not in the spans, is a RowError; a template whose turns have no end that a model could learn is a
DataError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ithaca.data.sources.read_records import encodable
from ithaca.data.tokens.chat_messages import (
    Message,
    Span,
    check_no_repr,
    is_learned,
    left_out_spans,
    read_messages,
    read_tools,
)
from ithaca.data.tokens.render_templates import Job, Template
from ithaca.data.tokens.special_spellings import BREAK, Broken, Spellings, plain_text, special_tokens
from ithaca.errors import DataError, RowError

Encoding = tuple[NDArray[np.int64], NDArray[np.bool_] | None]
# A tokenizer takes about a hundred bytes for each letter of a text that it is given whole.
LONGEST = 1 << 25
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Private-use letters: no document has them by accident, and one that does is refused.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands before and after every assistant's turn, the same in all conversations of a template."""

    opening: str
    closing: str


@dataclass(frozen=True)
class ChatEncoder:
    """Conversations to (ids, learned). `marks` is None where the template marks generations itself, or all is learned.
    `parts` is True for a template that takes content in parts alone; `name` is how messages call the template."""

    tokenizer: Any
    template: str
    learn_all: bool
    marks: Marks | None
    parts: bool = False
    name: str = field(default="the tokenizer's chat template", compare=False)

    @classmethod
    def make(cls, tokenizer: Any, template: str | None, learn: str, given: str = "") -> ChatEncoder:
        """`given` is what the run calls `template` by, None where the template is the tokenizer's own."""
        chosen = template or tokenizer.chat_template
        if isinstance(chosen, dict):
            chosen = chosen.get("default")
        if not chosen:
            raise DataError(
                "the documents are chat messages and this tokenizer has no chat template: set data.chat_template to a "
                "Jinja template or a file with one, or model.tokenizer to a chat model's"
            )
        folder = str(getattr(tokenizer, "name_or_path", "") or "")
        own = f"the chat template of {folder}" if folder else "the tokenizer's chat template"
        name = f"data.chat_template ({given})" if template and given else "data.chat_template" if template else own
        blank = cls(tokenizer, chosen, learn == "all", None, name=name)
        blank = replace(blank, parts=_wants_parts(blank))
        whole = learn == "all" or _GENERATION.search(chosen) is not None
        return blank if whole else replace(blank, marks=find_marks(blank))

    def __call__(self, value: object, tools: object = None) -> Encoding:
        return self.encode(value, tools)[:2]

    def encode(self, value: object, tools: object = None) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None, bool]:
        """Ids, which are learned, and True if a message holds the spelling of a special token."""
        messages, known = read_messages(value), read_tools(tools)
        if not self.learn_all and not any(message["role"] == "assistant" for message in messages):
            raise RowError("no message of the assistant: nothing to learn")
        try:
            broken = self._broken(messages, known)
            return *self._encode(messages, known, broken), broken is not None
        except RecursionError:
            raise RowError("its messages or tools are nested too deeply") from None

    def completion(
        self, prompt: object, completion: object, tools: object = None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None, bool]:
        """A prompt's messages and those that complete it; what is learned begins where the tokens of both part from
        those of the prompt with its generation prompt, as in TRL."""
        before, after, known = read_messages(prompt), read_messages(completion), read_tools(tools)
        messages = [*before, *after]
        if not self.learn_all and not all(is_learned(message) for message in after):
            raise RowError(
                "a completion is learned whole, and a message of it has weight 0 or train false: use messages"
            )
        try:
            broken = self._broken(messages, known)
            return *self._completed(before, messages, known, broken), broken is not None
        except RecursionError:
            raise RowError("its messages or tools are nested too deeply") from None

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """The conversation as text; what the template refuses is a RowError with its own words."""
        return self._render([Job(list(messages), tools, prompt)])[0][0]

    def _render(self, jobs: Sequence[Job]) -> list[tuple[str, list[Span]]]:
        found = []
        for answer in self._renderer.render([self._in_parts(job) for job in jobs]):
            if answer.refused:
                raise RowError(f"the chat template refuses it ({answer.refused})")
            if len(answer.text) > LONGEST:
                raise RowError(f"a conversation of {len(answer.text):,} letters: at most {LONGEST:,}; split it")
            found.append((encodable(answer.text), [(start, end) for start, end in answer.spans]))
        return found

    def _in_parts(self, job: Job) -> Job:
        if not self.parts:
            return job
        told = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in job.messages]
        return replace(job, messages=told)

    @cached_property
    def _renderer(self) -> Template:
        return Template(self.tokenizer, self.template, self.name)

    @cached_property
    def _spellings(self) -> Spellings:
        marks = "" if self.marks is None else self.marks.opening + self.marks.closing
        return Spellings.of(self.tokenizer, self.template, f"{marks}{self.tokenizer.eos_token}")

    def _broken(self, messages: list[Message], tools: Any) -> Broken | None:
        """The messages with spellings broken; None where the rendered text has no special token but the template's."""
        broken = self._spellings.broken(messages, tools)
        if broken is None:
            return None
        (plain, _), (text, _) = self._render([Job(messages, tools), Job(*broken)])
        return None if self._spellings.are_alike(plain, text) else broken

    def _encode(self, messages: list[Message], tools: Any, broken: Broken | None) -> Encoding:
        if broken is None:
            text, spans = self._learned(messages, tools)
            check_no_repr(text, messages, tools)
            found = self._tokens(text)
            ids = np.array(found["input_ids"], np.int64)
            if spans is None:
                return ids, None
            facts = text, found["offset_mapping"], found.char_to_token
            learn = self._mask(messages, spans, *facts)
            return ids, learn & ~self._mask(None, left_out_spans(messages, spans), *facts)
        (plain, _), (text, spans) = self._render([Job(messages, tools)])[0], self._learned(*broken)
        check_no_repr(plain, messages, tools)
        coded = self._plainly(plain, text)
        if spans is None:
            return coded.ids, None
        moved = [(coded.place(start), coded.place(end)) for start, end in spans]
        _check_contents(broken[0], [text[start:end] for start, end in spans])
        facts = coded.text, coded.found.offsets, coded.found.char_to_token
        return coded.ids, self._mask(None, moved, *facts) & ~self._mask(None, left_out_spans(messages, moved), *facts)

    def _learned(self, messages: list[Message], tools: Any) -> tuple[str, list[Span] | None]:
        """The text and its learned letters; None where all are learned."""
        if self.marks is not None:
            hidden = _hidden(messages)
            (text, _), (blank, _) = self._render([Job(messages, tools), Job(hidden, tools)])
            return text, find_spans(self.marks, hidden, blank, text)
        text, spans = self._render([Job(messages, tools, track=not self.learn_all)])[0]
        return text, None if self.learn_all else spans

    def _mask(
        self, messages: Sequence[Message] | None, spans: list[Span], text: str, offsets: Any, token_of: Any
    ) -> NDArray[np.bool_]:
        """The tokens of the learned letters; `messages` are those to be looked for in them, None where that is done."""
        if self.marks is not None:
            if messages is not None:
                _check_contents(messages, [text[start:end] for start, end in spans])
            return tokens_in(spans, offsets, text)
        learn = _tracked(spans, len(offsets), token_of)
        # transformers drops the rest of a mask where an offset is missing: what the turns hold must be in it.
        if messages is not None:
            _check_contents(messages, _masked_texts(text, learn, offsets))
        return learn

    def _completed(self, before: list[Message], messages: list[Message], tools: Any, broken: Broken | None) -> Encoding:
        jobs = [Job(before, tools, prompt=True), Job(messages, tools)]
        (asked, _), (text, _) = self._render(jobs)
        check_no_repr(text, messages, tools)
        if broken is None:
            first, ids = (np.array(self._tokens(each)["input_ids"], np.int64) for each in (asked, text))
        else:
            jobs = [Job(broken[0][: len(before)], broken[1], prompt=True), Job(broken[0], broken[1])]
            shown = self._render(jobs)
            first, ids = (self._plainly(*both).ids for both in ((asked, shown[0][0]), (text, shown[1][0])))
        return ids, None if self.learn_all else np.arange(len(ids)) >= common_length(first, ids)

    def _tokens(self, text: str) -> Any:
        return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _plainly(self, plain: str, text: str) -> Any:
        """The tokens of a text whose messages' spellings of special tokens are broken, as text."""
        if text.replace(BREAK, "") != plain or BREAK in plain:
            raise RowError("a message holds the spelling of a special token that the chat template reads")
        coder = plain_text(self.tokenizer)
        coded = coder.encode(text, self._spellings)
        if not coder.agrees(text, self._spellings, self._tokens(text)["input_ids"]):
            raise RowError("a message holds the spelling of a special token that this tokenizer cannot take as text")
        return coded


def common_length(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """How many tokens at the start are the same."""
    size = min(len(first), len(second))
    other = np.flatnonzero(first[:size] != second[:size])
    return int(other[0]) if len(other) else size


def _wants_parts(encoder: ChatEncoder) -> bool:
    """True if the template shows text in parts and loses or refuses content that is a text."""
    whole = [{"role": "user", "content": _OPEN}]
    try:
        if _OPEN in encoder.render(whole):
            return False
    except RowError:
        pass
    try:
        text = replace(encoder, parts=True).render(whole)
    except RowError:
        return False
    return _OPEN in text and "'type'" not in text


def _tracked(spans: Sequence[Span], count: int, token_of: Any) -> NDArray[np.bool_]:
    """The tokens of `{% generation %}` blocks, as transformers' apply_chat_template marks them."""
    learn = np.zeros(count, bool)
    for start, end in spans:
        if end < 1:
            raise RowError("the chat template begins with an empty generation")
        first, last = token_of(start), token_of(end - 1)
        if first is None:
            break
        learn[first : last + 1 if last else count] = True
    return learn


def find_marks(encoder: ChatEncoder) -> Marks:
    """Read the turns' marks off small conversations; DataError where a turn has no learnable end."""
    asked: Message = {"role": "user", "content": "q"}
    said: Message = {"role": "assistant", "content": _OPEN}
    try:
        prompt = encoder.render([asked], prompt=True)
        other = encoder.render([{**asked, "content": "z"}], prompt=True)
        without = encoder.render([asked])
        last = encoder.render([asked, said])
        inner = encoder.render([asked, said, asked])
    except RowError as error:
        raise DataError(f"the chat template cannot render a question and an answer: {error}") from None
    grown = prompt.startswith(without) and len(prompt) > len(without)
    # Where there is no generation prompt, an answer begins after what follows any question.
    opening = prompt[len(without) :] if grown else _common(prompt[::-1], other[::-1])[::-1]
    closing = _to_last(_common(_after(last), _after(inner)), special_tokens(encoder.tokenizer))
    if not opening or not closing or opening not in last[: last.find(_OPEN)]:
        raise DataError(
            "this chat template has no generation marks, and its assistant's turns do not end in a special token "
            f"(after the content comes {_after(last)[:40]!r}): add {{% generation %}} marks to it by "
            "data.chat_template, or set data.learn to 'all'"
        )
    return Marks(opening, closing)


def _after(text: str) -> str:
    return text[text.find(_OPEN) + len(_OPEN) :] if _OPEN in text else ""


def _common(first: str, second: str) -> str:
    size = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:size]


def _to_last(text: str, specials: set[str]) -> str:
    """Up to the end of the last special token."""
    end = max((at + len(token) for token in specials if (at := text.rfind(token)) >= 0), default=0)
    return text[:end]


def find_spans(marks: Marks, hidden: Sequence[Message], blank: str, text: str) -> list[Span]:
    """The characters of `text` that the assistant says: after the opening of each turn, its closing included. `blank`
    is the text of the `hidden` messages."""
    if _OPEN in text or _CLOSE in text:
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


def _hidden(messages: Sequence[Message]) -> list[Message]:
    """The messages with a sign of its own for each of the assistant's contents."""
    return [
        {**message, "content": f"{_OPEN}{place}{_CLOSE}"} if message["role"] == "assistant" else message
        for place, message in enumerate(messages)
    ]


def _fixed_parts(marks: Marks, hidden: Sequence[Message], text: str) -> list[str]:
    """What does not depend on the assistant: each part after the first begins with a closing, all but the last end
    with an opening."""
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
    """Which tokens have a letter in a span, and none but blanks before it: a token with a part of the prompt is not
    the assistant's. Blanks that a tokenizer leaves out of an offset are the next token's."""
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    before = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]])
    starts = np.minimum(starts, before)
    learn = np.zeros(len(ends), bool)
    for start, end in spans:
        inside = (starts < end) & (ends > start)
        for place in np.flatnonzero(inside & (starts < start)).tolist():
            inside[place] = not text[starts[place] : start].strip()
        learn |= inside
    return learn


def _masked_texts(text: str, learn: NDArray[np.bool_], offsets: Sequence[Span]) -> list[str]:
    """The stretches of text that a mask covers."""
    texts: list[str] = []
    last, until = -1, 0
    for place in np.flatnonzero(learn).tolist():
        start, end = offsets[place]
        if place == last + 1 and texts:
            texts[-1] += text[max(start, until) : end]
        else:
            texts.append(text[start:end])
        last, until = place, end
    return texts


def _check_contents(messages: Sequence[Message], texts: Sequence[str]) -> None:
    """Each assistant's visible content must stand, in order, in the learned stretches."""
    stretch, at = 0, 0
    for message in messages:
        if message["role"] != "assistant" or not isinstance(message["content"], str):
            continue
        wanted = message["content"].rpartition("</think>")[2].strip()
        while stretch < len(texts) and (found := texts[stretch].find(wanted, at)) < 0:
            stretch, at = stretch + 1, 0
        if stretch == len(texts):
            raise RowError("the chat template changes what the assistant says: its tokens cannot be told")
        at = found + len(wanted)
