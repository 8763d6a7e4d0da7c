"""`prepare`: a run's sources to tokens on disk, ready for `open_feed` to make rows of any length from.

Held back for validation are documents whose hash of seed, source and number falls below the share, or sources of
their own: never both in train and validation, and no document changes sides when another is added.

Invariant: `prepare` may be called again, and by many processes at once: what is there is opened, not made again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ithaca.config.schema import Data, Validation
from ithaca.data.rows.shuffle import Ints, held_back
from ithaca.data.rows.stream_sources import Streamed
from ithaca.data.sources.changes import Listing
from ithaca.data.sources.locate import locate
from ithaca.data.sources.source_names import VALIDATION, placed
from ithaca.data.tokens.store import Store
from ithaca.data.tokens.tokenize_source import Count, read_template, source_encoder, tokenize_source
from ithaca.errors import DataError

Split = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `open_feed` takes. `stores` hold the data's documents, `others` those of validation's own sources;
    `streamed` is there instead of `stores` where the data is streamed. `notes` are lines about files that are not read;
    `as_text`: spellings of special tokens in plain text were left text."""

    stores: tuple[Store, ...]
    others: tuple[Store, ...]
    streamed: Streamed | None
    share: float
    seed: int
    pad: int
    notes: tuple[str, ...] = ()
    as_text: bool = False

    @property
    def fingerprint(self) -> str:
        """Another one where what is trained on is other tokens, in other documents or another order; a stream's is that
        of its settings."""
        stores = [store.about["sum"] for store in self.stores]
        sources = [] if self.streamed is None else [one.source.model_dump_json() for one in self.streamed.located]
        held_back = 0.0 if self.others else self.share
        return hashlib.sha256(repr((stores, sources, held_back, self.seed)).encode()).hexdigest()[:16]

    @property
    def sources(self) -> list[list[Any]]:
        """The name of each stored source, the sum of its tokens and how many documents it has; plain JSON."""
        return [[store.about[key] for key in ("name", "sum", "documents")] for store in self.stores]

    @property
    def listings(self) -> list[list[int]]:
        """How many files each streamed source has, and the sum of their names and sizes; plain JSON."""
        return [] if self.streamed is None else [one.dump(0) for one in self.streamed.listings]

    def changes(self, saved: list[list[int]]) -> tuple[str, ...]:
        """What to tell of streamed sources whose files are not those of `listings` as it was saved."""
        if self.streamed is None or len(saved) != len(self.streamed.listings):
            return ()
        sources = zip(self.streamed.listings, self.streamed.located, saved, strict=True)
        return tuple(note for one, located, was in sources if (note := one.compare(was, located.name)))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Lines about files that are not read, and for every stored source about rows that are no documents and
        documents that spell special tokens."""
        lines = list(self.notes)
        for one in (store.about for store in (*self.stores, *self.others)):
            # A cache from before they were counted has no number of spellings.
            count = Count(one["rows"], one["bad"], tuple(one["named"]), spelled=one.get("spelled", 0))
            lines += count.notes(one["name"], one["kind"], self.as_text)
        return tuple(lines)

    def check_vocabulary(self, size: int) -> None:
        """DataError where a document holds an id that a model with so many does not have; a stream's are seen as they
        come."""
        for store in (*self.stores, *self.others):
            check_id(store.about["name"], store.about["largest"], size)

    @property
    def has_validation(self) -> bool:
        return self.share > 0 or bool(self.others)

    def documents(self, split: Split) -> tuple[tuple[Store, ...], Ints]:
        """The stores of a split and the numbers, counted over them, of its documents."""
        if split == "validation" and self.others:
            return self.others, np.arange(sum(store.about["documents"] for store in self.others))
        kept = self._validation() if split == "validation" else ~self._validation()
        return self.stores, np.flatnonzero(kept).astype(np.int64)

    def _validation(self) -> NDArray[np.bool_]:
        share = 0.0 if self.others else self.share
        parts = [
            held_back(np.arange(store.about["documents"]), self.seed, place, share)
            for place, store in enumerate(self.stores)
        ]
        return np.concatenate(parts)


def changed_sources(saved: list[list[Any]] | None, now: list[list[Any]]) -> str:
    """Name the sources whose documents differ from `saved`, which is None in checkpoints of earlier versions."""
    if not saved or len(saved) != len(now):
        return "the documents"
    pairs = [(was, there) for was, there in zip(saved, now, strict=True) if was[1] != there[1]]
    told = [f"{there[0]} ({there[2]:,} now, {was[2]:,} then)" for was, there in pairs]
    return f"the documents of {' and of '.join(told)}" if told else "the documents"


def check_id(where: str, largest: int, size: int) -> None:
    """DataError where the largest id is none of a vocabulary of `size`."""
    if largest >= size:
        raise DataError(
            f"{where} holds the id {largest}, this model's vocabulary is 0 to {size - 1}: set model.tokenizer to the "
            "model's own, or resize the model's embeddings to its tokenizer"
        )


def prepare(
    data: Data, tokenizer: Any, *, validation: Validation, seed: int, folder: Path, progress: bool = False
) -> Prepared:
    """Tokenize what is not yet in the cache: `data.cache`, or `folder` where the run names none."""
    cache = Path(data.cache).expanduser() if data.cache else folder
    located = [locate(*each) for each in placed(data.sources)]
    apart = [locate(*each) for each in placed(validation.sources, VALIDATION)]
    if not located:
        raise DataError("data.sources is empty: name at least one file, folder or hub name")
    streamed: Streamed | None = None
    stores: tuple[Store, ...] = ()
    if data.streaming:
        template = read_template(data)
        encoders = tuple(source_encoder(one, tokenizer, data, template) for one in located)
        share = 0.0 if apart else validation.share
        listings = tuple(Listing.of(one.files) for one in located)
        streamed = Streamed(tuple(located), encoders, listings, data.bad_share, share, seed)
    else:
        stores = tuple(tokenize_source(one, tokenizer, data, cache, progress=progress) for one in located)
    others = tuple(tokenize_source(one, tokenizer, data, cache, progress=progress) for one in apart)
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(token for token in pads if token is not None)
    notes = tuple(dict.fromkeys(note for one in (*located, *apart) for note in one.notes))
    return Prepared(stores, others, streamed, validation.share, seed, pad, notes, data.special_tokens == "text")
