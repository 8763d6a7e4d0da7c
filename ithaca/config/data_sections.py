"""Sections of the run file for the model and its documents: `model`, `lora`, `data`, `validation`.

The text below a field is its documentation: a list of all keys can be made from these texts and the defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from ithaca.config.field_types import Number, PathText, PositiveInt, Section, Share, ShareBelowOne, as_list


class ModelSettings(Section):
    """`model`: the model to train."""

    name: PathText = "embedded"
    """A model's folder, a hub name, or `embedded`: a small byte-level Llama made on the spot."""

    revision: str | None = None
    """Branch, tag or commit of the hub model; the hub's default if left out."""

    tokenizer: PathText | None = None
    """Folder or hub name of the tokenizer; the model's own if left out."""

    weights: Literal["pretrained", "random"] = "pretrained"
    """Start from the model's weights, or from random ones."""

    kernel: str = "auto"
    """Name of the attention kernel; `auto` takes the fastest that is exact for the model on this device."""

    config: dict[str, Any] = {}
    """Values that replace those of the model's config.json, such as `{attn_pdrop: 0}`."""


LoraTargets = Annotated[
    Literal["all-linear"] | list[str],
    BeforeValidator(lambda value: value if value == "all-linear" else as_list(value)),
]


class LoraSettings(Section):
    """`lora`: adapters instead of full fine-tuning; saved by themselves, merged on export."""

    rank: PositiveInt = 16
    """Rank of the adapters."""

    alpha: Number = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""

    dropout: ShareBelowOne = 0.0
    """Dropout on the adapters' input."""

    targets: LoraTargets = "all-linear"
    """Names of the modules that get an adapter; `all-linear` for every linear layer but the head."""


class SourceSettings(Section):
    """One entry of `data.sources` or `validation.sources`; a path alone stands for an entry with that path."""

    path: PathText
    """File, folder, glob or hub name; `stdlib` for the source code of Python's standard library."""

    format: Literal["auto", "jsonl", "parquet", "text", "code", "hub"] = "auto"
    """Format of the files; `auto` chooses by their names."""

    kind: Literal["auto", "text", "chat", "tokens", "pair", "alpaca"] = "auto"
    """Kind of the documents; `auto` chooses by the columns of the first rows."""

    column: str | None = None
    """Column that holds the documents; found by its name if left out."""

    labels: str | None = None
    """Column that holds the labels of documents that are token ids; `labels` if left out."""

    subset: str | None = None
    """Subset (config name) of a hub dataset."""

    split: str = "train"
    """Split of a hub dataset."""

    include: list[str] = []
    """Patterns of the files to read, such as `*.py`; all files if empty."""

    @model_validator(mode="before")
    @classmethod
    def _accept_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value


SourceList = Annotated[list[SourceSettings], BeforeValidator(as_list)]


class DataSettings(Section):
    """`data`: documents, and how they become rows of a step."""

    sources: SourceList = [SourceSettings(path="stdlib", format="code")]
    """Sources of documents, each a path or a section of its own."""

    rows: Literal["packed", "joined"] = "packed"
    """`packed`: documents are kept whole where they fit (best fit). `joined`: one stream, cut at the row's length."""

    learn: Literal["assistant", "all"] = "assistant"
    """Tokens of chats and pairs that enter the loss: the assistant's turns and completions, or all."""

    chat_template: str | None = None
    """Jinja template or a file that holds one; the tokenizer's own if left out."""

    special_tokens: Literal["parse", "text"] = "parse"
    """Spellings of special tokens in plain text: `parse` turns them into the tokens, `text` keeps them as text."""

    streaming: bool = False
    """Read and tokenize while training, with nothing kept on disk."""

    bad_share: Share = 0.01
    """Share of unreadable rows above which the run stops."""

    cache: PathText | None = None
    """Folder of the tokenized documents; `data` in the run's folder if left out."""

    workers: PositiveInt = 1
    """Processes that tokenize."""


class ValidationSettings(Section):
    """`validation`: documents held back, scored every `every` steps and after each stage."""

    share: Share = 0.0
    """Share of the training documents that is held back."""

    sources: SourceList = []
    """Sources of validation documents; where there are any, nothing is held back from the training data."""

    every: PositiveInt = 100
    """Steps between validations."""

    rows: PositiveInt = 16
    """Rows scored at each validation."""
