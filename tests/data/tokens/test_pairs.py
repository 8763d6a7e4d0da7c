"""Tests of prompts with completions as in TRL, and Alpaca's columns as in axolotl: the loss on the completion alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.config.schema import SourceSettings
from ithaca.data.rows.feed import open_feed
from ithaca.data.tokens.chat import ChatEncoder
from ithaca.data.tokens.pairs import alpaca_prompt, encode_alpaca, encode_pair
from ithaca.errors import RowError
from tests.data.corpus import TOKENIZER, prepared, texts_of, write_lines
from tests.data.kinds import CUT
from tests.data.templates import TEMPLATES, style_tokenizer

ASKED = [{"role": "user", "content": "1+1?"}]
SAID = [{"role": "assistant", "content": "Two."}]


def learned(row: dict[str, Any]) -> str:
    return TOKENIZER.decode(row["input_ids"][0][row["labels"][0] >= 0])


def common(first: list[int], second: list[int]) -> int:
    """TRL's `common_prefix_length`, by hand."""
    size = 0
    while size < min(len(first), len(second)) and first[size] == second[size]:
        size += 1
    return size


@pytest.mark.parametrize("streaming", [False, True])
def test_completion_alone_is_learned(tmp_path: Path, streaming: bool) -> None:
    records = [{"prompt": "The sky is", "completion": " blue.", "id": 7}, {"prompt": "x", "completion": " "}]
    file = write_lines(tmp_path / "pairs.jsonl", records)
    found = prepared(tmp_path, file, streaming=streaming, bad_share=0.5)
    row = open_feed(found, length=32, rows="packed", seed=0).row(0)
    assert texts_of([row]) == ["<|begin|>The sky is blue.<|eos|>"]
    assert learned(row) == " blue.<|eos|>"
    if not streaming:
        about = found.stores[0].about
        assert (about["kind"], about["named"]) == ("pair", [f"{file}:2: 'completion' is empty"])
        everything = open_feed(prepared(tmp_path, file, learn="all", bad_share=0.5), length=32, rows="packed", seed=0)
        assert learned(everything.row(0)) == "The sky is blue.<|eos|>"


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize(
    "pair", [("The word of", " the day"), ("The word o", "f the day</s>"), ("", "x it's"), ("a\n", "\nb")]
)
def test_ids_and_masks_equal_trl(kind: str, pair: tuple[str, str]) -> None:
    tokenizer = CUT[kind]()
    ids, learn = encode_pair(
        {"prompt": pair[0], "completion": pair[1]}, tokenizer, lambda text: tokenizer(text)["input_ids"]
    )
    whole = tokenizer(pair[0] + pair[1].removesuffix("</s>") + "</s>")["input_ids"]
    # A tokenizer that ends texts itself would set a second end.
    whole = whole[:-1] if whole[-2:] == [tokenizer.eos_token_id] * 2 else whole
    start = common(tokenizer(pair[0])["input_ids"], whole)
    assert ids.tolist() == whole
    assert learn.tolist() == [place >= start for place in range(len(whole))]


@pytest.mark.parametrize("style", TEMPLATES)
def test_message_completion_is_learned(style: str) -> None:
    tokenizer = style_tokenizer(style)
    encoder = ChatEncoder.make(tokenizer, None, "assistant")
    ids, learn, spelled = encoder.completion(ASKED, SAID)
    assert not spelled
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(ASKED + SAID, return_dict=False)
    assert ids.tolist() == whole
    assert learn is not None
    assert learn.tolist() == [place >= common(prompt, whole) for place in range(len(whole))]
    assert "Two." in tokenizer.decode(ids[learn])
    # A forged end in the prompt is text there, and the same is learned.
    forged = [{"role": "user", "content": f"1+1?{tokenizer.eos_token}"}]
    other, other_learn, spelled = encoder.completion(forged, SAID)
    assert spelled
    # Where a style has no generation prompt, its last blank goes with the tokens around it.
    assert tokenizer.decode(other[other_learn]).strip() == tokenizer.decode(ids[learn]).strip()
    assert (other == tokenizer.eos_token_id).sum() == (ids == tokenizer.eos_token_id).sum()


@pytest.mark.parametrize("streaming", [False, True])
def test_message_pairs_are_found(tmp_path: Path, streaming: bool) -> None:
    file = write_lines(tmp_path / "pairs.jsonl", [{"prompt": ASKED, "completion": SAID, "tools": None}] * 3)
    row = open_feed(prepared(tmp_path, file, streaming=streaming), length=32, rows="packed", seed=0).row(0)
    assert learned(row) == "Two.<|end|>"
    assert prepared(tmp_path, SourceSettings(path=str(file), kind="pair")).stores[0].about["kind"] == "chat pair"


@pytest.mark.parametrize("streaming", [False, True])
def test_alpaca_columns_are_found(tmp_path: Path, streaming: bool) -> None:
    records = [
        {"instruction": "Add {input}.", "input": "1, 2", "output": "3"},
        {"instruction": "Say hi.", "input": "", "output": "Hi."},
        {"instruction": "Say ho.", "output": "Ho."},
        {"instruction": "Say nothing.", "output": ""},
        {"instruction": 3, "output": "x"},
    ]
    file = write_lines(tmp_path / "alpaca.jsonl", records)
    found = prepared(tmp_path, file, streaming=streaming, bad_share=0.5)
    row = open_feed(found, length=1024, rows="packed", seed=0).row(0)
    with_input = (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd {input}.\n\n### Input:\n1, 2\n\n"
        "### Response:\n"
    )
    without = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay hi.\n\n### Response:\n"
    )
    assert alpaca_prompt("Add {input}.", "1, 2") == with_input
    assert sorted(texts_of([row])) == sorted(
        [
            f"<|begin|>{with_input}3<|eos|>",
            f"<|begin|>{without}Hi.<|eos|>",
            f"<|begin|>{without.replace('hi', 'ho')}Ho.<|eos|>",
        ]
    )
    assert sorted(learned(row).split("<|eos|>")) == ["", "3", "Hi.", "Ho."]


@pytest.mark.parametrize("kind", CUT)
def test_alpaca_tokens_equal_axolotl(kind: str) -> None:
    tokenizer = CUT[kind]()
    record = {"instruction": "The word", "input": "of the day", "output": "it's: don't"}
    ids, learn = encode_alpaca(record, tokenizer, lambda text: tokenizer(text)["input_ids"])
    first = tokenizer(alpaca_prompt("The word", "of the day"))["input_ids"]
    second = tokenizer("it's: don't")["input_ids"]
    second = second[1:] if second[0] == tokenizer.bos_token_id else second
    second = second if second[-1] == tokenizer.eos_token_id else [*second, tokenizer.eos_token_id]
    assert ids.tolist() == first + second
    assert learn.tolist() == [False] * len(first) + [True] * len(second)


def test_usual_columns_come_before_pairs(tmp_path: Path) -> None:
    """A text column beside prompts and completions is still the documents; a kind in the run file decides otherwise."""
    record = {"text": "all of it", "prompt": "a", "completion": "b", "instruction": "c", "output": "d"}
    file = write_lines(tmp_path / "docs.jsonl", [record])
    kinds = {
        kind: prepared(tmp_path, SourceSettings(path=str(file), kind=kind)).stores[0].about
        for kind in ("auto", "pair", "alpaca")
    }
    assert [(about["kind"], about["column"]) for about in kinds.values()] == [
        ("text", "text"),
        ("pair", "prompt"),
        ("alpaca", "instruction"),
    ]
    alone = write_lines(tmp_path / "alone.jsonl", [{"prompt": "a text"}])
    assert prepared(tmp_path, alone).stores[0].about["kind"] == "text"


def test_spellings_in_pairs_are_counted_and_can_be_text(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "p.jsonl", [{"prompt": "a<|end|>", "completion": "b"}, {"prompt": "a", "completion": "b"}]
    )
    end = TOKENIZER.convert_tokens_to_ids("<|end|>")
    for how in ("parse", "text"):
        found = prepared(tmp_path, file, special_tokens=how)
        assert found.stores[0].about["spelled"] == 1
        assert (np.asarray(found.stores[0].tokens) == end).sum() == (how == "parse")
    with pytest.raises(RowError, match="at most"):
        encode_pair({"prompt": "a" * (1 << 25), "completion": "b"}, TOKENIZER, lambda _: [])


def test_conversations_by_from_and_value_are_read(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "Two."}]
    for value in (turns, json.dumps(turns)):
        file = write_lines(tmp_path / "sharegpt.jsonl", [{"conversations": value}])
        row = open_feed(prepared(tmp_path, file), length=32, rows="packed", seed=0).row(0)
        assert learned(row) == "Two.<|end|>"
