"""Chat messages to tokens with the loss on what the assistant says, its end of turn among it, and nothing else.

A template with `{% generation %}` marks says itself what is learned. For the others the spans are found exactly, by
rendering twice: once as it is, once with every assistant's content replaced by a sign that occurs nowhere. The second
text falls apart into parts that do not depend on what the assistant says; those parts must occur, in order, in the
first one, and what lies between two of them, from the generation prompt to the end of the turn, is the assistant's.
Templates that rewrite history (thinking dropped from earlier turns) or trim contents fit that too.

Invariant: exact or refused. A conversation whose parts do not line up, whose text holds the template's own marks, or
whose contents are not in the spans, is a RowError; a template whose turns have no end that a model could learn is a
DataError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ithaca.data.read import RowError, encodable, json_list
from ithaca.errors import DataError

Message = dict[str, Any]
Span = tuple[int, int]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
# Private-use letters: no document has them by accident, and one that does is refused.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands before and after every assistant's turn, the same in all conversations of a template."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Conversations to (ids, learned). `marks` is None where the template marks generations itself, or all is learned."""

    tokenizer: Any
    template: str
    learn_all: bool
    marks: Marks | None

    @classmethod
    def make(cls, tokenizer: Any, template: str | None, learn: str) -> ChatEncoder:
        chosen = template or tokenizer.chat_template
        if isinstance(chosen, dict):
            chosen = chosen.get("default")
        if not chosen:
            raise DataError(
                "the documents are chat messages and this tokenizer has no chat template: set data.chat_template to a "
                "Jinja template or a file with one, or model.tokenizer to a chat model's"
            )
        whole = learn == "all" or _GENERATION.search(chosen) is not None
        blank = cls(tokenizer, chosen, learn == "all", None)
        return blank if whole else cls(tokenizer, chosen, False, find_marks(blank))

    def __call__(self, value: object, tools: object = None) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        messages = read_messages(value)
        tools = read_tools(tools)
        if not self.learn_all and not any(message["role"] == "assistant" for message in messages):
            raise RowError("no message of the assistant: nothing to learn")
        if self.marks is None and not self.learn_all:
            return self._marked(messages, tools)
        text = self.render(messages, tools)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(found["input_ids"], np.int64)
        if self.marks is None:
            return ids, None
        spans = find_spans(self, self.marks, messages, tools, text)
        _check_contents(messages, [text[start:end] for start, end in spans])
        return ids, tokens_in(spans, found["offset_mapping"], text)

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """The conversation as text; what the template refuses is a RowError with its own words."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except Exception as error:
            raise RowError(f"the chat template refuses it ({' '.join(str(error).split())[:200]})") from None
        return encodable(text)

    def _marked(self, messages: list[Message], tools: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        text = self.render(messages, tools)
        try:
            found = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
            )
        except Exception as error:
            raise RowError(f"the chat template refuses it ({' '.join(str(error).split())[:200]})") from None
        learn = np.array(found["assistant_masks"], bool)
        # transformers drops the rest of a mask where an offset is missing: what the turns hold must be in it.
        _check_contents(messages, _masked_texts(text, learn, found["offset_mapping"]))
        return np.array(found["input_ids"], np.int64), learn


def read_messages(value: object) -> list[Message]:
    """Messages as templates take them; `from` / `value` and the names of roles that other sets use are translated, and
    a list that is written as a string of JSON is read."""
    items = json_list(value) if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise RowError(f"a conversation is a {type(value).__name__}: a list of messages is needed")
    if not items:
        raise RowError("the conversation is empty")
    return [_message(item, place) for place, item in enumerate(items)]


def read_tools(value: object) -> list[Any] | None:
    """Tools as templates take them: a list, or a string of JSON that holds one; an empty string is none."""
    if value is None or value == "":
        return None
    items = json_list(value) if isinstance(value, str) else value
    if not isinstance(items, list):
        raise RowError(f"'tools' is a {type(value).__name__}: a list is needed, or a string of JSON that holds one")
    return items or None


def _message(item: object, place: int) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"message {place} is a {type(item).__name__}: an object with role and content is needed")
    message = {key: inner for key, inner in item.items() if inner is not None}
    role = message.pop("from", None) or message.get("role")
    content = message.pop("value", None) if "content" not in message else message["content"]
    if not isinstance(role, str):
        raise RowError(f"message {place} has no role, only {', '.join(map(str, item)) or 'nothing'}")
    if content is None and not message.get("tool_calls"):
        raise RowError(f"message {place} ({role}) has no content")
    if not isinstance(content, str | list | None):
        raise RowError(f"the content of message {place} ({role}) is a {type(content).__name__}, text is needed")
    return message | {"role": _ROLES.get(role, role), "content": "" if content is None else content}


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
    closing = _to_last(_common(_after(last), _after(inner)), _special_tokens(encoder.tokenizer))
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


def _special_tokens(tokenizer: Any) -> set[str]:
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {*tokenizer.all_special_tokens, *added}


def _to_last(text: str, specials: set[str]) -> str:
    """Up to the end of the last special token."""
    end = max((at + len(token) for token in specials if (at := text.rfind(token)) >= 0), default=0)
    return text[:end]


def find_spans(encoder: ChatEncoder, marks: Marks, messages: Sequence[Message], tools: Any, text: str) -> list[Span]:
    """The characters of `text` that the assistant says: after the opening of each turn, its closing included."""
    if _OPEN in text or _CLOSE in text:
        raise RowError("the text has the private-use letters U+E0F0 or U+E0F1: take them out")
    parts = _fixed_parts(encoder, marks, messages, tools)
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


def _fixed_parts(encoder: ChatEncoder, marks: Marks, messages: Sequence[Message], tools: Any) -> list[str]:
    """What does not depend on the assistant: each part after the first begins with a closing, all but the last end
    with an opening."""
    signs = [f"{_OPEN}{place}{_CLOSE}" for place in range(len(messages))]
    hidden = [
        {**message, "content": sign} if message["role"] == "assistant" else message
        for message, sign in zip(messages, signs, strict=True)
    ]
    text = encoder.render(hidden, tools)
    parts, start = [], 0
    for message, sign in zip(hidden, signs, strict=True):
        if message["role"] != "assistant":
            continue
        at = text.find(sign, start)
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
