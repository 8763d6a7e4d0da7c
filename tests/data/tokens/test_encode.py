"""Tests of records to tokens: masks and labels of ready token ids, and JSON in strings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ithaca.config.schema import SourceSettings
from ithaca.data.rows.feed import open_feed
from tests.data.corpus import TOKENIZER, epoch_of, prepared, texts_of, whole, write_lines


def test_padding_of_token_ids_is_dropped(tmp_path: Path) -> None:
    records = [
        {"input_ids": [1, 2, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0]},
        {"input_ids": [-1, 4, 5, 6], "attention_mask": [0, 1, 1, 1], "labels": [0, -100, 5, 6]},
        {"input_ids": [7, 8, 9], "attention_mask": [True, True, False], "labels": [7, 8, 9]},
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1]},
        {"input_ids": [1, 2, 3], "attention_mask": [0, 0, 0]},
        {"input_ids": [1, 2, 3], "attention_mask": [[1, 1, 1]]},
        {"input_ids": [0, 2, 3], "attention_mask": [0, 1, 1], "labels": [0, 2, 7]},
    ]
    store = prepared(tmp_path, write_lines(tmp_path / "t.jsonl", records), bad_share=0.7).stores[0]
    found = [store.piece(place, 0, int(count)) for place, count in enumerate(store.lengths)]
    assert [ids.tolist() for ids, _ in found] == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert [learn.tolist() for _, learn in found] == [[True] * 3, [False, True, True], [True] * 2]
    reasons = [bad_row.split(": ", 1)[1] for bad_row in store.about["named"]]
    assert reasons[:3] == [
        "'attention_mask' has 2 entries for 3 tokens",
        "'attention_mask' leaves no token",
        "'attention_mask' is no list of whole numbers",
    ]
    assert reasons[3].startswith("'labels'[2] is 7 where the token is 3")


def test_half_a_surrogate_pair_is_a_bad_row(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "docs.jsonl", [{"text": "good"}, {"text": "bad \ud800 letter"}, {"text": "\ud83d\ude00"}]
    )
    both = prepared(tmp_path, file, bad_share=0.4)
    assert both.stores[0].about["named"] == [
        f"{file}:2: letter 4 is U+D800, half of a surrogate pair: not Unicode text"
    ]
    feed = open_feed(both, length=64, rows="packed", seed=0)
    assert sorted(texts_of(epoch_of(feed))) == sorted([whole("good"), whole("\U0001f600")])


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_chat_as_json_is_chat(tmp_path: Path, column: str) -> None:
    messages = json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}])
    file = write_lines(tmp_path / "chat.jsonl", [{column: "[broken"}, {column: messages}, {column: messages}])
    found = prepared(tmp_path, file, bad_share=0.4)
    about = found.stores[0].about
    assert (about["kind"], about["column"], about["documents"], about["bad"]) == ("chat", column, 2, 1)
    assert about["named"] == [f"{file}:1: a conversation is a str: a list of messages is needed"]
    row = open_feed(found, length=16, rows="packed", seed=0).row(0)
    assert TOKENIZER.decode(row["input_ids"][0][row["labels"][0] >= 0]) == "yo<|end|>"
    # What the run file says is believed, and a column of another name is text unless it says chat.
    assert prepared(tmp_path, SourceSettings(path=str(file), kind="text")).stores[0].about["kind"] == "text"
    other = write_lines(tmp_path / "other.jsonl", [{"text": messages}])
    assert prepared(tmp_path, other).stores[0].about["kind"] == "text"
    assert prepared(tmp_path, SourceSettings(path=str(other), kind="chat")).stores[0].about["kind"] == "chat"


def test_tools_as_json_reach_the_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    records = [{"messages": messages, "tools": tools}, {"messages": messages, "tools": "f"}]
    file = write_lines(tmp_path / "chat.jsonl", records)
    template = "{% if tools %}{{ tools[0].function.name }}{% endif %}" + TOKENIZER.chat_template
    found = prepared(tmp_path, file, chat_template=template, bad_share=0.5)
    assert [bad_row.partition(": ")[2][:19] for bad_row in found.stores[0].about["named"]] == ["'tools' is a str: a"]
    row = open_feed(found, length=32, rows="packed", seed=0).row(0)
    assert texts_of([row])[0].startswith("f<|begin|><|user|>hi")
