"""Documents of streamed sources, one batch from each source in turn, epoch after epoch, with a state to resume from.

A source's state is that of `datasets` (file and row) and a few counts. A document's number within its source decides if
it is held back for validation: both splits read the same stream and keep their own documents.

Invariant: after `restore(state)` the batches are those that followed when `state()` was saved.
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
from ithaca.data.sources.changes import FileListing
from ithaca.data.sources.locate import FoundSource
from ithaca.data.sources.read_records import RawRow, open_rows, raw_rows
from ithaca.data.tokens.encode import Encoded, Encoder
from ithaca.data.tokens.encode_rows import encode_batch
from ithaca.data.tokens.row_counts import RowCounts
from ithaca.data.tokens.tokenize_source import HOPELESS
from ithaca.errors import DataError

_BATCH = 16
# Rows before which the share of bad rows is too uncertain to refuse a source.
_ENOUGH = 200


@dataclass(frozen=True, slots=True)
class StreamedSources:
    """Sources of a stream and their encoders. `share` of the documents is held back, chosen by `seed`."""

    located: tuple[FoundSource, ...]
    encoders: tuple[Encoder, ...]
    listings: tuple[FileListing, ...]
    bad_share: float
    share: float
    seed: int


@dataclass(frozen=True, slots=True)
class Document:
    """Tokenized document. `origin`: its file and row; `learn`: its loss mask, None if all tokens are learned."""

    origin: str
    ids: NDArray[np.int64]
    learn: NDArray[np.bool_] | None

    def piece(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        learn = np.ones(count, bool) if self.learn is None else self.learn[start : start + count]
        return self.ids[start : start + count], learn


@dataclass(slots=True)
class _Source:
    """Source that is being read. `documents`: number in this epoch, both splits; `read`: files read to their end."""

    located: FoundSource
    encoder: Encoder
    listing: FileListing
    count: RowCounts = field(default_factory=RowCounts)
    documents: int = 0
    read: int = 0
    done: bool = False
    _position: dict[str, Any] | None = None
    _rows: Any = None
    _iterator: Iterator[RawRow] | None = None

    def state(self) -> dict[str, Any]:
        position = self._position if self._iterator is None else copy.deepcopy(self._rows.state_dict())
        return {
            "rows": self.count.rows,
            "bad": self.count.bad,
            "targets": self.count.targets,
            "spelled": self.count.spelled,
            "documents": self.documents,
            "files": self.listing.dump(self.read),
            "done": self.done,
            "place": None if self.done else position,
        }

    def restore(self, state: dict[str, Any]) -> None:
        # Keys of a state are in checkpoints: they keep their names, and later ones may be missing.
        # States of earlier versions have no count of targets: 1 passes the check for it.
        self.count = RowCounts(
            state["rows"], state["bad"], targets=state.get("targets", 1), spelled=state.get("spelled", 0)
        )
        self.documents, self.done, self._position = state["documents"], state["done"], state["place"]
        self.read = state["files"][0] if "files" in state else 0
        self._rows = self._iterator = None

    def batch(self, bad_share: float) -> list[Document]:
        """Return the next few documents; set `done` at the source's end."""
        if self._iterator is None:
            self._rows = open_rows(self.located, streaming=True, columns=self.encoder.columns)
            if self._position is not None:
                self._rows.load_state_dict(copy.deepcopy(self._position))
            self._iterator = raw_rows(self.located, self._rows, self.count.rows + 1)
        # A fixed number of rows, not of bytes: saved states end at multiples of it.
        raws = list(islice(self._iterator, _BATCH))
        self.done = len(raws) < _BATCH
        files = self.located.files
        if files:
            self.read = len(files) if self.done else files.index(raws[-1].file, self.read)
        found = []
        for raw, answer in encode_batch(raws, self.encoder):
            self.count.add(raw, answer)
            if isinstance(answer, Encoded):
                found.append(Document(raw.origin, answer.ids, answer.learn))
        if self.done or self.count.rows >= _ENOUGH:
            self.count.check(self.located, bad_share)
        if self.done or self.count.rows >= HOPELESS:
            self.count.check_learned(self.located)
        return found

    def notes(self) -> tuple[str, ...]:
        return self.count.notes(self.located.name, self.encoder.kind.name, self.encoder.as_text)


class RoundRobin:
    """Sources of a split, read one batch from each in turn."""

    def __init__(self, streamed: StreamedSources, *, validation: bool) -> None:
        self._streamed, self._validation = streamed, validation
        self._epoch = self._turn = self._taken = 0
        self._left_out: tuple[str, ...] = ()
        self._sources = self._unread_sources()

    def _unread_sources(self) -> list[_Source]:
        streamed = self._streamed
        parts = zip(streamed.located, streamed.encoders, streamed.listings, strict=True)
        return [_Source(*each) for each in parts]

    def state(self) -> dict[str, Any]:
        """Return the position in every source, plain JSON."""
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
        """Return lines about sources with changed files; DataError if files read to their end have changed."""
        pairs = zip(self._sources, state["sources"], strict=True)
        notes = (
            source.listing.compare(saved["files"], source.located.name) for source, saved in pairs if "files" in saved
        )
        return tuple(note for note in notes if note)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Lines about bad rows and spelled special tokens, in the last whole epoch or since the start."""
        return self._left_out or tuple(line for source in self._sources for line in source.notes())

    def batch(self) -> tuple[list[Document], bool]:
        """Return some documents of this split, or none, and True if the epoch ends with them."""
        number = self._turn % len(self._sources)
        self._turn += 1
        source = self._sources[number]
        if source.done:
            return [], False
        first = source.documents
        found = source.batch(self._streamed.bad_share)
        source.documents += len(found)
        # By number within the source, not by content: both splits count the same documents.
        held = held_back(np.arange(first, source.documents), self._streamed.seed, number, self._streamed.share)
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
        self._sources = self._unread_sources()
