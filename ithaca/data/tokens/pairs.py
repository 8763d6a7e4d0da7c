"""Prompts with completions, the loss on the completion alone.

    prompt, completion           two texts, as in TRL: one text that ends with EOS; the loss begins at the first token
                                 that differs from the prompt's tokens
    prompt, completion           two lists of messages: `ChatEncoder.completion`
    instruction, input, output   Alpaca's columns, as in axolotl: the prompt below and the output are tokenized apart,
                                 then EOS; `input` may be empty or missing

Invariant: a prompt's token is learned only if TRL learns it too, where one token reaches into the completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ithaca.data.tokens.chat import LONGEST, common_length
from ithaca.errors import RowError

PAIR, ALPACA = ("prompt", "completion"), ("instruction", "output")
INPUT = "input"
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response "
    "that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
Tokens = Callable[[str], list[int]]


def alpaca_prompt(instruction: str, extra_input: str) -> str:
    """Return the text before the output."""
    return (_WITH_INPUT if extra_input else _WITHOUT_INPUT).format(instruction=instruction, input=extra_input)


def encode_pair(
    record: Mapping[str, Any], tokenizer: Any, tokens: Tokens
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ids and the loss mask of a prompt with its completion. `tokens`: ids of a text, BOS among them."""
    prompt, completion = (_text(record, column) for column in PAIR)
    _check_size(prompt + completion)
    end = tokenizer.eos_token or ""
    # As TRL does it, the end is written; where it is to be text, or the tokenizer adds one, it is set as a token.
    whole = tokens(prompt + completion.removesuffix(end))
    if not whole or whole[-1] != tokenizer.eos_token_id:
        whole = [*whole, tokenizer.eos_token_id]
    ids = np.array(whole, np.int64)
    return ids, np.arange(len(ids)) >= common_length(np.array(tokens(prompt), np.int64), ids)


def encode_alpaca(
    record: Mapping[str, Any], tokenizer: Any, tokens: Tokens
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ids and the loss mask of an Alpaca record."""
    instruction, output = (_text(record, column) for column in ALPACA)
    extra_input = record.get(INPUT) or ""
    if not isinstance(extra_input, str):
        raise RowError(f"{INPUT!r} is a {type(extra_input).__name__}, text is needed")
    prompt = alpaca_prompt(instruction, extra_input)
    _check_size(prompt + output)
    first, second = tokens(prompt), tokens(output)
    # The output is tokenized as a text of its own, so it may have got a BOS.
    if second and second[0] == tokenizer.bos_token_id:
        second = second[1:]
    if not second or second[-1] != tokenizer.eos_token_id:
        second = [*second, tokenizer.eos_token_id]
    ids = np.array([*first, *second], np.int64)
    return ids, np.arange(len(ids)) >= len(first)


def _text(record: Mapping[str, Any], column: str) -> str:
    value = record.get(column)
    if not isinstance(value, str):
        what = f"no {column!r}" if value is None else f"{column!r} is a {type(value).__name__}"
        raise RowError(f"{what}, text is needed")
    if not value.strip() and column in (PAIR[1], ALPACA[1]):
        raise RowError(f"{column!r} is empty")
    return value


def _check_size(text: str) -> None:
    if len(text) > LONGEST:
        raise RowError(f"{len(text):,} letters: at most {LONGEST:,} in a prompt and what completes it; split it")
