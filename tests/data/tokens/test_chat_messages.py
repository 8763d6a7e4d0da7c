"""Tests of content in parts, and of templates that print lists and mappings."""

from __future__ import annotations

from typing import Any

import pytest

from ithaca.data.tokens.chat import ChatEncoder
from ithaca.data.tokens.chat_messages import read_messages
from ithaca.errors import RowError
from tests.data.templates import QWEN, TEMPLATES, style_tokenizer

TOKENIZERS = {style: style_tokenizer(style) for style in TEMPLATES}
TEXTS = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Yo."}]


def in_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:], "image": None}]


@pytest.mark.parametrize("style", TEMPLATES)
def test_content_in_text_parts_is_joined(style: str) -> None:
    encoder = ChatEncoder.make(TOKENIZERS[style], None, "assistant")
    ids, learn = encoder([{**message, "content": in_parts(message["content"])} for message in TEXTS])
    other, other_learn = encoder(TEXTS)
    assert ids.tolist() == other.tolist()
    assert learn.tolist() == other_learn.tolist()
    assert "'type'" not in TOKENIZERS[style].decode(ids)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([{"type": "image"}], r"part 0 of message 0 \(user\) is of type 'image': only text"),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}], "part 1 .* is of type 'image_url'"),
        ([{"type": "tool_use", "input": {}}], "of type 'tool_use'"),
        ([{"type": "text"}], "part 0 of message 0 .user. has no text, but a NoneType"),
        ([{"type": "text", "text": ["a"]}], "has no text, but a list"),
        (["a"], "part 0 of message 0 .user. is a str"),
        ([], "has no content"),
        ({"type": "text", "text": "a"}, "is a dict, text is needed"),
        ([[{"type": "text", "text": "a"}]], "is a list"),
    ],
)
def test_other_parts_are_refused_by_message_and_part(content: Any, match: str) -> None:
    with pytest.raises(RowError, match=match):
        read_messages([{"role": "user", "content": content}])


def test_template_that_needs_parts_gets_them() -> None:
    parts_alone = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = TOKENIZERS["qwen"]
    encoder = ChatEncoder.make(tokenizer, parts_alone, "assistant")
    assert encoder.parts
    ids, learn = encoder(TEXTS)
    expected = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nYo.<|im_end|>\n"
    assert tokenizer.decode(ids) == expected
    assert tokenizer.decode(ids[learn]) == "Yo.<|im_end|>"


def test_template_that_prints_python_repr_is_refused() -> None:
    printing = QWEN.replace("(call.function | tojson)", "(call.function.arguments | string)")
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
    messages = [TEXTS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(RowError, match="as Python prints it: use its filter `tojson`"):
        ChatEncoder.make(TOKENIZERS["qwen"], printing, "assistant")(messages)
    # As JSON, and in words of a message, it is what it is.
    encoder = ChatEncoder.make(TOKENIZERS["qwen"], None, "assistant")
    encoder(messages)
    encoder([{"role": "user", "content": f"what is {call['function']['arguments']}?"}, *messages[1:]])


def test_missing_content_beside_tool_calls_is_empty() -> None:
    call = {"function": {"name": "add", "arguments": "{}"}}
    (message,) = read_messages([{"role": "assistant", "content": None, "tool_calls": [call], "name": None}])
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}


ANSWERED = [*TEXTS, {"role": "user", "content": "More"}, {"role": "assistant", "content": "No."}]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
@pytest.mark.parametrize("style", [*TEMPLATES, "marked", "spelled"])
def test_answer_with_weight_0_is_not_learned(style: str, flag: dict[str, Any]) -> None:
    tokenizer = TOKENIZERS["qwen" if style in ("marked", "spelled") else style]
    encoder = ChatEncoder.make(tokenizer, MARKED if style == "marked" else None, "assistant")
    first = {**ANSWERED[0], "content": "Hi <|im_end|>"} if style == "spelled" else ANSWERED[0]
    messages = [first, *ANSWERED[1:]]
    ids, learn = encoder([first, ANSWERED[1] | flag, ANSWERED[2], ANSWERED[3] | {"weight": 1, "train": True}])
    whole, all_learned = encoder(messages)
    assert ids.tolist() == whole.tolist()
    last = int(all_learned.sum()) - int(learn.sum())
    places = all_learned.nonzero()[0].tolist()
    assert 0 < last < len(places)
    assert learn.nonzero()[0].tolist() == places[last:]
    assert "No." in tokenizer.decode(ids[learn])
    assert "Yo" not in tokenizer.decode(ids[learn])


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (({"weight": 0}, {"train": False}), "every message of the assistant has weight 0 or train false"),
        (({"weight": 0.5}, {}), "weight is 0.5: 0 or 1"),
        (({"weight": "0"}, {}), "weight is '0': 0 or 1"),
        (({}, {"train": "no"}), "train is 'no': true or false"),
    ],
)
def test_weights_that_cannot_be_kept_are_refused(flags: tuple[dict[str, Any], ...], match: str) -> None:
    encoder = ChatEncoder.make(TOKENIZERS["qwen"], None, "assistant")
    with pytest.raises(RowError, match=match):
        encoder([ANSWERED[0], ANSWERED[1] | flags[0], ANSWERED[2], ANSWERED[3] | flags[1]])


def test_weight_within_a_completion_is_refused() -> None:
    encoder = ChatEncoder.make(TOKENIZERS["qwen"], None, "assistant")
    with pytest.raises(RowError, match="a completion is learned whole"):
        encoder.completion([TEXTS[0]], [TEXTS[1] | {"weight": 0}])
    ids, learn, _ = encoder.completion([TEXTS[0], TEXTS[1] | {"weight": 0}, TEXTS[0]], [TEXTS[1]])
    assert 0 < learn.sum() < len(ids)
