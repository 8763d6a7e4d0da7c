"""Documents of streamed sources, a batch from each in turn, epoch after epoch, with a state to go on from.

The state of a source is `datasets`' own (file and row) and a few counts; the number of a document within its source
decides whether it is held back for validation, so both splits read the same stream and take their own.

Invariant: after `restore(state)` the batches are those that followed when `state()` was taken.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ithaca.data.rows.shuffle import held_back
from ithaca.data.sources.changes import Listing
from ithaca.data.sources.locate import Located
from ithaca.data.sources.read_records import Raw, open_rows, raw_rows
from ithaca.data.tokens.encode import Encoded, Encoder
from ithaca.data.tokens.tokenize_source import HOPELESS, Count, encode_batch
from ithaca.errors import DataError

_BATCH = 16
# Before as many rows a share of bad ones says little.
_ENOUGH = 200


@dataclass(frozen=True, slots=True)
class Streamed:
    """Sources to be read as they come, and how. `share` of the documents is held back, by `seed`."""

    located: tuple[Located, ...]
    encoders: tuple[Encoder, ...]
    listings: tuple[Listing, ...]
    bad_share: float
    share: float
    seed: int


@dataclass(frozen=True, slots=True)
class Document:
    """A tokenized document and where it came from."""

    origin: str
    ids: NDArray[np.int64]
    learn: NDArray[np.bool_] | None

    def piece(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        learn = np.ones(count, bool) if self.learn is None else self.learn[start : start + count]
        return self.ids[start : start + count], learn


@dataclass(slots=True)
class _Source:
    """One source under way. `documents` counts those of this epoch, of both splits, `read` the files read to their end."""

    located: Located
    encoder: Encoder
    listing: Listing
    count: Count = field(default_factory=Count)
    documents: int = 0
    read: int = 0
    done: bool = False
    _place: dict[str, Any] | None = None
    _rows: Any = None
    _iterator: Iterator[Raw] | None = None

    def state(self) -> dict[str, Any]:
        place = self._place if self._iterator is None else copy.deepcopy(self._rows.state_dict())
        return {
            "rows": self.count.rows,
            "bad": self.count.bad,
            "targets": self.count.targets,
            "spelled": self.count.spelled,
            "documents": self.documents,
            "files": self.listing.dump(self.read),
            "done": self.done,
            "place": None if self.done else place,
        }

    def restore(self, state: dict[str, Any]) -> None:
        # A state without a count of targets is not judged by it.
        self.count = Count(
            state["rows"], state["bad"], targets=state.get("targets", 1), spelled=state.get("spelled", 0)
        )
        self.documents, self.done, self._place = state["documents"], state["done"], state["place"]
        self.read = state["files"][0] if "files" in state else 0
        self._rows = self._iterator = None

    def batch(self, bad_share: float) -> list[Document]:
        """The next few documents; sets `done` at the end."""
        if self._iterator is None:
            self._rows = open_rows(self.located, streaming=True, columns=self.encoder.columns)
            if self._place is not None:
                self._rows.load_state_dict(copy.deepcopy(self._place))
            self._iterator = raw_rows(self.located, self._rows, self.count.rows + 1)
        # By the row, not by the byte: where a batch ends is in the states that runs go on from.
        raws = list(islice(self._iterator, _BATCH))
        self.done = len(raws) < _BATCH
        if self.located.files:
            self.read = self._ended(raws)
        found = []
        for raw, answer in encode_batch(raws, self.encoder):
            self.count.add(raw, answer)
            if isinstance(answer, Encoded):
                found.append(Document(raw.place, answer.ids, answer.learn))
        if self.done or self.count.rows >= _ENOUGH:
            self.count.check(self.located, bad_share)
        if self.done or self.count.rows >= HOPELESS:
            self.count.check_learned(self.located)
        return found

    def notes(self) -> tuple[str, ...]:
        return self.count.notes(self.located.name, self.encoder.kind.name, self.encoder.as_text)

    def _ended(self, raws: list[Raw]) -> int:
        """How many files lie before that of the last row."""
        files = self.located.files
        return len(files) if self.done else files.index(raws[-1].file, self.read)


class Turns:
    """All sources of a split, a batch of each in turn."""

    def __init__(self, streamed: Streamed, *, validation: bool) -> None:
        self._streamed, self._validation = streamed, validation
        self._epoch = self._turn = self._taken = 0
        self._left_out: tuple[str, ...] = ()
        self._sources = self._fresh()

    def _fresh(self) -> list[_Source]:
        streamed = self._streamed
        parts = zip(streamed.located, streamed.encoders, streamed.listings, strict=True)
        return [_Source(*each) for each in parts]

    def state(self) -> dict[str, Any]:
        """Plain JSON."""
        counts = {"epoch": self._epoch, "turn": self._turn, "taken": self._taken}
        return counts | {"sources": [source.state() for source in self._sources]}

    def restore(self, state: dict[str, Any]) -> None:
        if len(state["sources"]) != len(self._sources):
            raise DataError(
                f"the stream was saved with {len(state['sources'])} sources and the run has {len(self._sources)}: "
                "resume with the sources it was started with"
            )
        self._epoch, self._turn, self._taken = state["epoch"], state["turn"], state["taken"]
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.restore(saved)

    def compare(self, state: dict[str, Any]) -> tuple[str, ...]:
        """What to tell of sources that are not as they were; DataError where what was read of them is not."""
        pairs = zip(self._sources, state["sources"], strict=True)
        notes = (
            source.listing.compare(saved["files"], source.located.name) for source, saved in pairs if "files" in saved
        )
        return tuple(note for note in notes if note)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Lines for every source some of whose rows, of the last whole epoch or as far as they were read, are no
        documents or spell special tokens."""
        return self._left_out or tuple(line for source in self._sources for line in source.notes())

    def batch(self) -> tuple[list[Document], bool]:
        """Some documents of this split (or none), and whether the epoch ends with them."""
        place = self._turn % len(self._sources)
        self._turn += 1
        source = self._sources[place]
        if source.done:
            return [], False
        numbered = source.documents
        found = source.batch(self._streamed.bad_share)
        source.documents += len(found)
        numbers = np.arange(numbered, source.documents)
        held = held_back(numbers, self._streamed.seed, place, self._streamed.share)
        kept = [document for document, out in zip(found, held, strict=True) if bool(out) == self._validation]
        self._taken += len(kept)
        ended = all(source.done for source in self._sources)
        if ended:
            self._next_epoch()
        return kept, ended

    def _next_epoch(self) -> None:
        if not self._taken:
            split = "validation" if self._validation else "training"
            raise DataError(
                f"no document of the stream is left for {split} at validation.share={self._streamed.share:g}: set "
                "another share, or validation.sources"
            )
        self._left_out = self.left_out
        self._epoch, self._turn, self._taken = self._epoch + 1, 0, 0
        self._sources = self._fresh()
