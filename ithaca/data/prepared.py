"""A run's sources as tokens on disk (`prepare`), from which `open_feed` makes rows of any length.

Validation documents are those whose hash of (seed, source, number) falls below the share, or sources of their own. So
no document is in both splits, and none changes its split when another is added.

Invariant: many processes may call `prepare` at once and again; a source that is in the cache is opened, not tokenized.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ithaca.config.schema import DataSettings, ValidationSettings
from ithaca.data.rows.shuffle import Ints, held_back
from ithaca.data.rows.stream_sources import StreamedSources
from ithaca.data.sources.changes import FileListing
from ithaca.data.sources.locate import locate
from ithaca.data.sources.source_names import VALIDATION, with_keys
from ithaca.data.tokens.row_counts import RowCounts
from ithaca.data.tokens.store import Store
from ithaca.data.tokens.tokenize_source import read_template, source_encoder, tokenize_source
from ithaca.errors import DataError

Split = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Documents of a run, as `open_feed` takes them.

    `stores`: the training data, empty if `streamed` has it. `others`: validation's own sources. `notes`: lines about
    files that are not read. `as_text`: spellings of special tokens in plain text stay text.
    """

    stores: tuple[Store, ...]
    others: tuple[Store, ...]
    streamed: StreamedSources | None
    share: float
    seed: int
    pad: int
    notes: tuple[str, ...] = ()
    as_text: bool = False

    @property
    def fingerprint(self) -> str:
        """Hash of the training tokens, their documents and their order; of a stream's settings."""
        stores = [store.about["sum"] for store in self.stores]
        sources = [] if self.streamed is None else [one.source.model_dump_json() for one in self.streamed.located]
        held_back = 0.0 if self.others else self.share
        return hashlib.sha256(repr((stores, sources, held_back, self.seed)).encode()).hexdigest()[:16]

    @property
    def sources(self) -> list[list[Any]]:
        """Name, checksum and number of documents of each stored source; plain JSON."""
        return [[store.about[key] for key in ("name", "sum", "documents")] for store in self.stores]

    @property
    def listings(self) -> list[list[int]]:
        """Number of files of each streamed source, and a checksum of their names and sizes; plain JSON."""
        return [] if self.streamed is None else [one.dump(0) for one in self.streamed.listings]

    def changes(self, saved: list[list[int]]) -> tuple[str, ...]:
        """Return lines about streamed sources whose files are not those of the saved `listings`."""
        if self.streamed is None or len(saved) != len(self.streamed.listings):
            return ()
        sources = zip(self.streamed.listings, self.streamed.located, saved, strict=True)
        return tuple(note for one, located, was in sources if (note := one.compare(was, located.name)))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Lines about files that are not read, rows that are no documents, and documents that spell special tokens."""
        lines = list(self.notes)
        for one in (store.about for store in (*self.stores, *self.others)):
            # Caches of earlier versions have no count of spellings.
            count = RowCounts(one["rows"], one["bad"], tuple(one["named"]), spelled=one.get("spelled", 0))
            lines += count.notes(one["name"], one["kind"], self.as_text)
        return tuple(lines)

    def check_vocabulary(self, size: int) -> None:
        """Refuse stored documents with an id outside of a vocabulary of `size`; a stream's ids are checked later."""
        for store in (*self.stores, *self.others):
            check_id(store.about["name"], store.about["largest"], size)

    @property
    def has_validation(self) -> bool:
        return self.share > 0 or bool(self.others)

    def documents(self, split: Split) -> tuple[tuple[Store, ...], Ints]:
        """Return the stores of a split and the numbers, counted over all stores, of its documents."""
        if split == "validation" and self.others:
            return self.others, np.arange(sum(store.about["documents"] for store in self.others))
        share = 0.0 if self.others else self.share
        held = np.concatenate(
            [
                held_back(np.arange(store.about["documents"]), self.seed, number, share)
                for number, store in enumerate(self.stores)
            ]
        )
        kept = held if split == "validation" else ~held
        return self.stores, np.flatnonzero(kept).astype(np.int64)


def changed_sources(saved: list[list[Any]] | None, now: list[list[Any]]) -> str:
    """Return words for the sources whose documents differ from `saved` (None in checkpoints of earlier versions)."""
    if not saved or len(saved) != len(now):
        return "the documents"
    pairs = [(old, new) for old, new in zip(saved, now, strict=True) if old[1] != new[1]]
    changed = [f"{new[0]} ({new[2]:,} now, {old[2]:,} then)" for old, new in pairs]
    return f"the documents of {' and of '.join(changed)}" if changed else "the documents"


def check_id(where: str, largest: int, size: int) -> None:
    """Refuse documents whose largest id is outside of a vocabulary of `size`."""
    if largest >= size:
        raise DataError(
            f"{where} holds the id {largest}, this model's vocabulary is 0 to {size - 1}: set model.tokenizer to the "
            "model's own, or resize the model's embeddings to its tokenizer"
        )


def prepare(
    data: DataSettings,
    tokenizer: Any,
    *,
    validation: ValidationSettings,
    seed: int,
    folder: Path,
    progress: bool = False,
) -> Prepared:
    """Tokenize the sources that are not in the cache yet: `data.cache`, or `folder` if that is not set."""
    cache = Path(data.cache).expanduser() if data.cache else folder
    located = [locate(*each) for each in with_keys(data.sources)]
    apart = [locate(*each) for each in with_keys(validation.sources, VALIDATION)]
    if not located:
        raise DataError("data.sources is empty: name at least one file, folder or hub name")
    streamed: StreamedSources | None = None
    stores: tuple[Store, ...] = ()
    if data.streaming:
        template = read_template(data)
        encoders = tuple(source_encoder(one, tokenizer, data, template) for one in located)
        share = 0.0 if apart else validation.share
        listings = tuple(FileListing.of(one.files) for one in located)
        streamed = StreamedSources(tuple(located), encoders, listings, data.bad_share, share, seed)
    else:
        stores = tuple(tokenize_source(one, tokenizer, data, cache, progress=progress) for one in located)
    others = tuple(tokenize_source(one, tokenizer, data, cache, progress=progress) for one in apart)
    # Any id serves as padding: its label is -100 and its document -1.
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(token for token in pads if token is not None)
    notes = tuple(dict.fromkeys(note for one in (*located, *apart) for note in one.notes))
    return Prepared(stores, others, streamed, validation.share, seed, pad, notes, data.special_tokens == "text")
