"""Chat messages to tokens, with the loss on the assistant's turns and their ends, and on nothing else.

    template with {% generation %} marks   the marks decide
    any other template                     rendered twice, the second time with the assistant's contents replaced: the
                                           texts agree outside of the assistant's turns (`turn_spans.py`)

Templates that drop thinking from earlier turns or trim contents fit too. A message's content is text: the spelling of
a special token in it becomes no token (`special_spellings.py`), so no message can end its own turn. Templates are
rendered in a process that can be ended (`render_templates.py`).

Invariant: exact or refused. A conversation whose loss mask is not certain is a RowError; a template whose turns have no
learnable end is a DataError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
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
from ithaca.data.tokens.render_templates import RenderJob, Template
from ithaca.data.tokens.special_spellings import BREAK, Broken, Spellings, plain_tokenizer, special_tokens
from ithaca.data.tokens.turn_spans import (
    OPEN,
    TurnMarks,
    check_contents,
    find_spans,
    generation_mask,
    hide_contents,
    masked_texts,
    tokens_in,
)
from ithaca.errors import DataError, RowError

Encoding = tuple[NDArray[np.int64], NDArray[np.bool_] | None]
# Letters of the longest conversation: a tokenizer needs about a hundred bytes of memory for each.
LONGEST = 1 << 25
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatEncoder:
    """Encoder of conversations to (ids, loss mask).

    `marks`: None if the template marks generations itself, or all tokens are learned. `parts`: True for a template that
    takes content in parts only. `name`: name of the template in messages.
    """

    tokenizer: Any
    template: str
    learn_all: bool
    marks: TurnMarks | None
    parts: bool = False
    name: str = field(default="the tokenizer's chat template", compare=False)

    @classmethod
    def make(cls, tokenizer: Any, template: str | None, learn: str, given: str = "") -> ChatEncoder:
        """Make the encoder of a template; None stands for the tokenizer's own. `given`: its name in the run file."""
        chosen = template or tokenizer.chat_template
        if isinstance(chosen, dict):
            # Tokenizers with several templates (default, tool_use, rag) name them.
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
        # Multimodal models' templates read content as a list of parts, and drop or print a plain text.
        blank = replace(blank, parts=_needs_parts(blank))
        whole = learn == "all" or _GENERATION.search(chosen) is not None
        return blank if whole else replace(blank, marks=find_marks(blank))

    def __call__(self, value: object, tools: object = None) -> Encoding:
        return self.encode(value, tools)[:2]

    def encode(self, value: object, tools: object = None) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None, bool]:
        """Return ids, loss mask (None: all), and True if a message holds the spelling of a special token."""
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
        """Encode a prompt's messages and those that complete it.

        As in TRL, the loss begins at the first token in which both differ from the prompt with its generation prompt.
        """
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
        """Return the conversation as text; a refusal of the template is a RowError with its words."""
        return self._render([RenderJob(list(messages), tools, prompt)])[0][0]

    def _render(self, jobs: Sequence[RenderJob]) -> list[tuple[str, list[Span]]]:
        found = []
        for answer in self._renderer.render([self._in_parts(job) for job in jobs]):
            if answer.refused:
                raise RowError(f"the chat template refuses it ({answer.refused})")
            if len(answer.text) > LONGEST:
                raise RowError(f"a conversation of {len(answer.text):,} letters: at most {LONGEST:,}; split it")
            found.append((encodable(answer.text), [(start, end) for start, end in answer.spans]))
        return found

    def _in_parts(self, job: RenderJob) -> RenderJob:
        if not self.parts:
            return job
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in job.messages]
        return replace(job, messages=messages)

    @cached_property
    def _renderer(self) -> Template:
        return Template(self.tokenizer, self.template, self.name)

    @cached_property
    def _spellings(self) -> Spellings:
        marks = "" if self.marks is None else self.marks.opening + self.marks.closing
        return Spellings.of(self.tokenizer, self.template, f"{marks}{self.tokenizer.eos_token}")

    def _broken(self, messages: list[Message], tools: Any) -> Broken | None:
        """Return the messages with spellings broken; None if every special token of the text is the template's own."""
        broken = self._spellings.broken(messages, tools)
        if broken is None:
            return None
        (plain, _), (text, _) = self._render([RenderJob(messages, tools), RenderJob(*broken)])
        return None if self._spellings.has_equal_tokens(plain, text) else broken

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
        (plain, _), (text, spans) = self._render([RenderJob(messages, tools)])[0], self._learned(*broken)
        check_no_repr(plain, messages, tools)
        coded = self._plainly(plain, text)
        if spans is None:
            return coded.ids, None
        moved = [(coded.position(start), coded.position(end)) for start, end in spans]
        check_contents(broken[0], [text[start:end] for start, end in spans])
        facts = coded.text, coded.found.offsets, coded.found.char_to_token
        return coded.ids, self._mask(None, moved, *facts) & ~self._mask(None, left_out_spans(messages, moved), *facts)

    def _learned(self, messages: list[Message], tools: Any) -> tuple[str, list[Span] | None]:
        """Return the text and the spans of its learned letters; None for the spans if all are learned."""
        if self.marks is not None:
            hidden = hide_contents(messages)
            (text, _), (blank, _) = self._render([RenderJob(messages, tools), RenderJob(hidden, tools)])
            return text, find_spans(self.marks, hidden, blank, text)
        text, spans = self._render([RenderJob(messages, tools, track=not self.learn_all)])[0]
        return text, None if self.learn_all else spans

    def _mask(
        self, messages: Sequence[Message] | None, spans: list[Span], text: str, offsets: Any, token_of: Any
    ) -> NDArray[np.bool_]:
        """Return the tokens of the learned letters. `messages`: check that their contents are in; None to skip."""
        if self.marks is not None:
            if messages is not None:
                check_contents(messages, [text[start:end] for start, end in spans])
            return tokens_in(spans, offsets, text)
        learn = generation_mask(spans, len(offsets), token_of)
        # transformers ends a mask early at a letter without a token: every content must be inside of the mask.
        if messages is not None:
            check_contents(messages, masked_texts(text, learn, offsets))
        return learn

    def _completed(self, before: list[Message], messages: list[Message], tools: Any, broken: Broken | None) -> Encoding:
        jobs = [RenderJob(before, tools, prompt=True), RenderJob(messages, tools)]
        (prompt, _), (text, _) = self._render(jobs)
        check_no_repr(text, messages, tools)
        if broken is None:
            first, ids = (np.array(self._tokens(each)["input_ids"], np.int64) for each in (prompt, text))
        else:
            jobs = [RenderJob(broken[0][: len(before)], broken[1], prompt=True), RenderJob(broken[0], broken[1])]
            shown = self._render(jobs)
            first, ids = (self._plainly(*both).ids for both in ((prompt, shown[0][0]), (text, shown[1][0])))
        return ids, None if self.learn_all else np.arange(len(ids)) >= common_length(first, ids)

    def _tokens(self, text: str) -> Any:
        return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _plainly(self, plain: str, text: str) -> Any:
        """Return the tokens of a text with broken spellings, where each spelling becomes text."""
        if text.replace(BREAK, "") != plain or BREAK in plain:
            raise RowError("a message holds the spelling of a special token that the chat template reads")
        coder = plain_tokenizer(self.tokenizer)
        coded = coder.encode(text, self._spellings)
        if not coder.agrees(text, self._spellings, self._tokens(text)["input_ids"]):
            raise RowError("a message holds the spelling of a special token that this tokenizer cannot take as text")
        return coded


def common_length(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Return the number of equal tokens at the start."""
    size = min(len(first), len(second))
    other = np.flatnonzero(first[:size] != second[:size])
    return int(other[0]) if len(other) else size


def _needs_parts(encoder: ChatEncoder) -> bool:
    """True if the template shows content in parts, and loses or refuses content that is a text."""
    whole = [{"role": "user", "content": OPEN}]
    try:
        if OPEN in encoder.render(whole):
            return False
    except RowError:
        pass
    try:
        text = replace(encoder, parts=True).render(whole)
    except RowError:
        return False
    return OPEN in text and "'type'" not in text


def find_marks(encoder: ChatEncoder) -> TurnMarks:
    """Read the marks of a turn off small conversations; DataError if the turns have no learnable end."""
    question: Message = {"role": "user", "content": "q"}
    answer: Message = {"role": "assistant", "content": OPEN}
    try:
        prompt = encoder.render([question], prompt=True)
        other = encoder.render([{**question, "content": "z"}], prompt=True)
        without = encoder.render([question])
        last = encoder.render([question, answer])
        inner = encoder.render([question, answer, question])
    except RowError as error:
        raise DataError(f"the chat template cannot render a question and an answer: {error}") from None
    grown = prompt.startswith(without) and len(prompt) > len(without)
    # Without a generation prompt, an answer begins after the text that follows any question.
    opening = prompt[len(without) :] if grown else _common_start(prompt[::-1], other[::-1])[::-1]
    closing = _to_last(_common_start(_after(last), _after(inner)), special_tokens(encoder.tokenizer))
    if not opening or not closing or opening not in last[: last.find(OPEN)]:
        raise DataError(
            "this chat template has no generation marks, and its assistant's turns do not end in a special token "
            f"(after the content comes {_after(last)[:40]!r}): add {{% generation %}} marks to it by "
            "data.chat_template, or set data.learn to 'all'"
        )
    return TurnMarks(opening, closing)


def _after(text: str) -> str:
    """Return the text after the assistant's content."""
    return text[text.find(OPEN) + len(OPEN) :] if OPEN in text else ""


def _common_start(first: str, second: str) -> str:
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _to_last(text: str, specials: set[str]) -> str:
    """Return the text up to the end of its last special token."""
    end = max((at + len(token) for token in specials if (at := text.rfind(token)) >= 0), default=0)
    return text[:end]
