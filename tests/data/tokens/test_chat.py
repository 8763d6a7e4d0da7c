"""Tests of chat masks: the assistant's turns and their ends, nothing else, in four styles of templates."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from ithaca.data.tokens.chat import ChatEncoder, find_marks
from ithaca.data.tokens.chat_messages import read_messages, read_tools
from ithaca.data.tokens.turn_spans import tokens_in
from ithaca.errors import DataError, RowError
from ithaca.models.files.embedded import embedded_tokenizer
from tests.data.templates import QWEN, TEMPLATES, said, style_tokenizer

STYLES = list(TEMPLATES)
TOKENIZERS = {style: style_tokenizer(style) for style in STYLES}
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nbe kind\n</think>\n\nHello! "},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2"},
]


def stretches(tokenizer: Any, ids: np.ndarray, learn: np.ndarray) -> list[str]:
    """The learned runs of tokens, decoded."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], learn.astype(int), [0]])))
    return [tokenizer.decode(ids[start:end]) for start, end in bounds.reshape(-1, 2)]


def encode(style: str, messages: list[dict[str, Any]], learn: str = "assistant") -> tuple[np.ndarray, Any]:
    return ChatEncoder.make(TOKENIZERS[style], None, learn)(messages)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("llama", ["<think>\nbe kind\n</think>\n\nHello!<|eot_id|>", "<think>\nadd\n</think>\n\n2<|eot_id|>"]),
        ("qwen", ["Hello! <|im_end|>", "<think>\nadd\n</think>\n\n2<|im_end|>"]),
        # The tokenizer has " [/INST] " as one token: it is the prompt's.
        ("mistral", ["<think>\nbe kind\n</think>\n\nHello! </s>", "<think>\nadd\n</think>\n\n2</s>"]),
        ("gemma", ["<think>\nbe kind\n</think>\n\nHello!<end_of_turn>", "<think>\nadd\n</think>\n\n2<end_of_turn>"]),
    ],
)
def test_assistant_turn_and_its_end_are_learned(style: str, expected: list[str]) -> None:
    ids, learn = encode(style, CONVERSATION)
    assert stretches(TOKENIZERS[style], ids, learn) == expected
    # A mask off by one token is another text.
    for shift in (-1, 1):
        assert stretches(TOKENIZERS[style], ids, np.roll(learn, shift)) != expected


def random_text(rng: random.Random) -> str:
    words = ["Hello", "42", "é😀", "\n", "\n\n", " ", "[INST]", "think", "x = 1", "<think>", "assistant\n", "user", "`"]
    text = "".join(rng.choice(words) for _ in range(rng.randint(1, 8)))
    return text if text.strip() else text + "a"


def random_conversation(rng: random.Random) -> list[dict[str, Any]]:
    turns = []
    for _ in range(rng.randint(1, 5)):
        turns.append({"role": "user", "content": random_text(rng).replace("<think>", "?")})
        thought = f"<think>\n{rng.choice(['hm', 'a b', ''])}\n</think>\n\n" if rng.random() < 0.4 else ""
        answer = random_text(rng).replace("<think>", "!").replace("[INST]", "(INST)")
        turns.append({"role": "assistant", "content": thought + answer})
    return turns


@pytest.mark.parametrize("style", STYLES)
def test_random_conversation_has_the_mask_made_by_hand(style: str) -> None:
    """Against a rendering written by hand: the same text, and learned is what has a letter of a learned piece."""
    tokenizer = TOKENIZERS[style]
    encoder = ChatEncoder.make(tokenizer, None, "assistant")
    rng = random.Random(7)
    for _ in range(60):
        messages = random_conversation(rng)
        pieces = said(style, messages)
        text = "".join(piece for piece, _ in pieces)
        assert encoder.render(messages) == text
        letters = np.repeat([learned for _, learned in pieces], [len(piece) for piece, _ in pieces])
        given = ~letters & np.array([not letter.isspace() for letter in text])
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, learn = encoder(messages)
        assert ids.tolist() == found["input_ids"]
        assert learn is not None
        expected = [letters[a:b].any() and not given[a:b].any() for a, b in found["offset_mapping"]]
        assert learn.tolist() == expected


def test_template_with_marks_is_used_and_checked() -> None:
    tokenizer = embedded_tokenizer()
    encoder = ChatEncoder.make(tokenizer, None, "assistant")
    assert encoder.marks is None
    ids, learn = encoder(CONVERSATION)
    assert learn is not None
    contents = [turn["content"] + "<|end|>" for turn in CONVERSATION if turn["role"] == "assistant"]
    assert stretches(tokenizer, ids, learn) == contents
    # Marks around another role's words: what the assistant says is not in the mask.
    wrong = tokenizer.chat_template.replace("== 'assistant'", "== 'user'")
    with pytest.raises(RowError, match="changes what the assistant says"):
        ChatEncoder.make(tokenizer, wrong, "assistant")(CONVERSATION)


def test_learn_all_has_no_mask() -> None:
    ids, learn = encode("llama", CONVERSATION, learn="all")
    assert learn is None
    assert TOKENIZERS["llama"].decode(ids) == "".join(piece for piece, _ in said("llama", CONVERSATION))


def test_tools_and_reasoning_are_not_learned() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "it said 2"},
    ]
    ids, learn = encode("qwen", messages)
    assert stretches(TOKENIZERS["qwen"], ids, learn) == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "<think>\nit said 2\n</think>\n\nTwo.<|im_end|>",
    ]


def test_marks_of_each_style_are_found() -> None:
    found = {style: find_marks(ChatEncoder(TOKENIZERS[style], TEMPLATES[style], False, None)) for style in STYLES}
    assert {style: (marks.opening, marks.closing) for style, marks in found.items()} == {
        "llama": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        "qwen": ("<|im_start|>assistant\n", "<|im_end|>"),
        "mistral": (" [/INST]", "</s>"),
        "gemma": ("<start_of_turn>model\n", "<end_of_turn>"),
    }


def test_refusal_of_a_template_is_a_bad_row() -> None:
    system = [{"role": "system", "content": "Be brief."}, *CONVERSATION]
    with pytest.raises(RowError, match="must alternate"):
        encode("mistral", system)
    with pytest.raises(RowError, match="System role not supported"):
        encode("gemma", system)


def test_template_that_changes_contents_is_refused() -> None:
    shouting = QWEN.replace(
        "'<|im_start|>assistant\\n' + content }}", "'<|im_start|>assistant\\n' + content | upper }}"
    )
    encoder = ChatEncoder.make(TOKENIZERS["qwen"], shouting, "assistant")
    with pytest.raises(RowError, match="changes what the assistant says"):
        encoder(CONVERSATION)


def test_template_that_drops_an_answer_is_refused() -> None:
    forgetful = TEMPLATES["gemma"].replace("{% for message in messages %}", "{% for message in messages[:3] %}")
    encoder = ChatEncoder.make(TOKENIZERS["gemma"], forgetful, "assistant")
    with pytest.raises(RowError, match="leaves an assistant's message out"):
        encoder(CONVERSATION)


def test_template_without_learnable_ends_is_refused() -> None:
    plain = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    with pytest.raises(DataError, match=r"do not end in a special token.*data\.learn"):
        ChatEncoder.make(TOKENIZERS["llama"], plain, "assistant")


def test_missing_template_names_the_setting() -> None:
    with pytest.raises(DataError, match=r"no chat template: set data\.chat_template"):
        ChatEncoder.make(style_tokenizer("qwen", template=False), None, "assistant")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("hi", "a conversation is a str"),
        ('{"role": "user"}', "a conversation is a str: a list of messages is needed"),
        ("[]", "empty"),
        ([], "empty"),
        ([3], "message 0 is a int"),
        ([{"content": "x"}], "has no role"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": 3}], "is a int, text is needed"),
    ],
)
def test_bad_message_is_a_bad_row(value: object, match: str) -> None:
    with pytest.raises(RowError, match=match):
        read_messages(value)


def test_conversation_without_answers_is_a_bad_row() -> None:
    with pytest.raises(RowError, match="nothing to learn"):
        encode("llama", CONVERSATION[:1])


def test_other_role_names_are_translated() -> None:
    other = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
    assert read_messages(other) == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]


def test_messages_and_tools_as_json_are_parsed() -> None:
    assert read_messages(json.dumps(CONVERSATION)) == CONVERSATION
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert read_tools(json.dumps(tools)) == read_tools(tools) == tools
    assert [read_tools(none) for none in (None, "", [], "[]")] == [None] * 4
    template = "{% if tools %}<|im_start|>system\n{{ tools[0].function.name }}<|im_end|>\n{% endif %}" + QWEN
    encoder = ChatEncoder.make(TOKENIZERS["qwen"], template, "assistant")
    ids, learn = encoder(CONVERSATION, json.dumps(tools))
    assert TOKENIZERS["qwen"].decode(ids).startswith("<|im_start|>system\nadd<|im_end|>")
    listed, same = encoder(CONVERSATION, tools)
    assert ids.tolist() == listed.tolist()
    assert (learn == same).all()


@pytest.mark.parametrize("tools", ["add, subtract", '{"name": "add"}', "null", {"name": "add"}])
def test_tools_that_are_no_list_make_a_bad_row(tools: object) -> None:
    with pytest.raises(RowError, match=r"'tools' is a (str|dict): a list is needed"):
        ChatEncoder.make(TOKENIZERS["qwen"], None, "assistant")(CONVERSATION, tools)


@pytest.mark.parametrize("marked", [True, False])
def test_half_a_surrogate_pair_is_a_bad_row(marked: bool) -> None:
    encoder = ChatEncoder.make(embedded_tokenizer() if marked else TOKENIZERS["qwen"], None, "assistant")
    with pytest.raises(RowError, match=r"U\+D800, half of a surrogate pair"):
        encoder([*CONVERSATION[:3], {"role": "assistant", "content": "so \ud800"}])


def test_blank_outside_offsets_belongs_to_the_next_token() -> None:
    # "ab| cd|e" with the blank trimmed off the second token's offset, and a token that is a blank alone.
    assert tokens_in([(2, 5)], [(0, 2), (3, 5), (5, 6)], "ab cde").tolist() == [False, True, False]
    assert tokens_in([(2, 3)], [(0, 2), (3, 3), (3, 5)], "ab cd").tolist() == [False, True, False]


def test_token_across_the_prompt_is_learned_only_if_blank() -> None:
    assert tokens_in([(3, 5)], [(0, 4), (4, 5)], "ab:cd").tolist() == [False, True]
    assert tokens_in([(3, 5)], [(0, 2), (2, 4), (4, 5)], "ab cd").tolist() == [False, True, True]
