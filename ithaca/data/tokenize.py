"""A source's documents, tokenized once into a store and found there ever after.

The store's name is a hash of all that its content depends on: the files' names, sizes and times, the tokenizer, the
chat template, what is learned. A file lock lets many processes ask at once: the first works, the others wait and open.

Invariant: rows that are no documents are counted and the first few named; beyond `bad_share` they are a DataError.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ithaca.config import Data
from ithaca.data.encode import Encoded, Encoder, Kind, find_kind, make_encoder
from ithaca.data.locks import clear_left, locked
from ithaca.data.read import Raw, RowError, open_rows, parse_row, raw_rows
from ithaca.data.sources import Located
from ithaca.data.store import VERSION, Store, StoreWriter, open_store
from ithaca.errors import DataError

NAMED = 5
# As many rows without one good among them are not worth going on.
HOPELESS = 1000
_PEEK = 100
_BATCH_ROWS = 128
# A tokenizer holds about a hundred bytes for each byte it is at.
_BATCH_BYTES = 1 << 19

logger = logging.getLogger("ithaca")


@dataclass(slots=True)
class Count:
    """Rows seen, those that were no documents, and the tokens to be learned of the others."""

    rows: int = 0
    bad: int = 0
    named: tuple[str, ...] = ()
    targets: int = 0

    def add(self, raw: Raw, answer: Encoded | RowError) -> None:
        self.rows += 1
        if isinstance(answer, RowError):
            self.bad += 1
            if len(self.named) < NAMED:
                self.named = (*self.named, f"{raw.place}: {answer}")
        else:
            self.targets += answer.targets

    def check(self, name: str, share: float) -> None:
        """DataError where more rows are bad than the run allows, or where all are."""
        if not self.rows:
            raise DataError(f"{name} is empty: it holds no rows; correct data.sources")
        if self.bad == self.rows or self.bad > share * self.rows:
            named = "; ".join(self.named)
            allowed = "no document is left" if self.bad == self.rows else f"data.bad_share allows {share:g} of them"
            raise DataError(
                f"{self.bad:,} of {self.rows:,} rows of {name} are no documents, {allowed}: {named}; mend them, correct "
                "the column and kind, or raise data.bad_share"
            )

    def left_out(self, name: str) -> str:
        """A line about the rows that are no documents; nothing where all are."""
        if not self.bad:
            return ""
        first = f", the first: {self.named[0]}" if self.named else ""
        return f"{self.bad:,} of {self.rows:,} rows of {name} are no documents and are left out{first}"

    def check_learned(self, name: str) -> None:
        """DataError where no token is left that a loss could be of."""
        if not self.targets:
            raise DataError(
                f"nothing in {name} is to be learned: its documents are of one token, or no token after their first has "
                "a label other than -100; mend them, or set data.sources.labels to the column that has the labels"
            )


def read_template(data: Data) -> str | None:
    """The chat template that the run sets: Jinja itself, or a file that holds it."""
    given = data.chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template {given!r} is no Jinja template and no file that can be read ({error})"
        ) from None


def source_encoder(located: Located, tokenizer: Any, data: Data, template: str | None) -> Encoder:
    """How this source's records become tokens, found out from its first rows."""
    if located.format in ("text", "code"):
        kind = Kind("text", "text")
    else:
        kind = find_kind(located.source, _first_records(located, data), located.name)
    return make_encoder(kind, tokenizer, located.source, template, data.learn)


def _first_records(located: Located, data: Data) -> list[Any]:
    count, records = Count(), []
    for raw in islice(raw_rows(located, open_rows(located, streaming=data.streaming)), _PEEK):
        try:
            records.append(parse_row(raw))
            count.rows += 1
        except RowError as error:
            count.add(raw, error)
    count.check(located.name, share=1.0)
    return records


def cache_key(located: Located, tokenizer: Any, data: Data, template: str | None) -> str:
    """A name for what the tokens depend on."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = inner.to_str() if inner is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = template or tokenizer.chat_template
    facts = (VERSION, located.fingerprint(), vocabulary, str(tokenizer.eos_token), repr(template), data.learn)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def tokenize_source(located: Located, tokenizer: Any, data: Data, folder: Path, *, progress: bool) -> Store:
    """The store of a source, made if it is not there."""
    template = read_template(data)
    target = folder / cache_key(located, tokenizer, data, template)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_left(folder)
        with locked(folder / f"{target.name}.lock"):
            store = open_store(target)
            if store is None:
                encoder = source_encoder(located, tokenizer, data, template)
                _write(located, encoder, data, target, progress)
                store = open_store(target)
    except OSError as error:
        raise DataError(
            f"the cache {folder} cannot be written ({error}): make room there, or set data.cache to another folder"
        ) from error
    assert store is not None, f"{target} was written and is not whole"
    about = store.about
    count = Count(about["rows"], about["bad"], tuple(about["named"]), about["targets"])
    count.check(located.name, data.bad_share)
    count.check_learned(located.name)
    return store


def _write(located: Located, encoder: Encoder, data: Data, target: Path, progress: bool) -> None:
    # Ids may lie further apart than there are of them.
    writer = StoreWriter.start(target, 1 + max(encoder.tokenizer.get_vocab().values()))
    count = Count()
    if located.left_out:
        logger.warning(located.left_out)
    try:
        with _bar(located, progress) as advance:
            for raw, answer in encode_rows(
                raw_rows(located, open_rows(located, streaming=False)), encoder, data.workers
            ):
                count.add(raw, answer)
                if isinstance(answer, Encoded):
                    writer.add(answer.ids, answer.learn, raw.file, raw.row)
                elif count.bad == count.rows == HOPELESS:
                    count.check(located.name, share=1.0)
                advance(raw)
        writer.finish(
            {
                "name": located.name,
                "format": located.format,
                "kind": encoder.kind.name,
                "column": encoder.kind.column,
                "rows": count.rows,
                "bad": count.bad,
                "named": count.named,
                "targets": count.targets,
            }
        )
    except BaseException:
        writer.abandon()
        raise


def encode_batch(batch: list[Raw], encoder: Encoder) -> list[tuple[Raw, Encoded | RowError]]:
    """Parse and tokenize some rows together; the answers in the rows' order."""
    parsed: list[Any] = []
    for raw in batch:
        try:
            parsed.append(parse_row(raw))
        except RowError as error:
            parsed.append(error)
    found = iter(encoder([record for record in parsed if not isinstance(record, RowError)]))
    answers = [record if isinstance(record, RowError) else next(found) for record in parsed]
    return [(Raw(raw.file, raw.row, None, raw.size), answer) for raw, answer in zip(batch, answers, strict=True)]


def encode_rows(rows: Iterable[Raw], encoder: Encoder, workers: int) -> Iterator[tuple[Raw, Encoded | RowError]]:
    """All rows in order, by batches; `workers` above 1 are processes, with a few batches under way at a time."""
    if workers == 1:
        for batch in batches(rows):
            yield from encode_batch(batch, encoder)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting: list[Future[list[tuple[Raw, Encoded | RowError]]]] = []
        for batch in batches(rows):
            waiting.append(pool.submit(encode_batch, batch, encoder))
            if len(waiting) > 2 * workers:
                yield from waiting.pop(0).result()
        for future in waiting:
            yield from future.result()


def batches(rows: Iterable[Raw]) -> Iterator[list[Raw]]:
    """Rows by the hundred, fewer where they are long."""
    batch: list[Raw] = []
    size = 0
    for raw in rows:
        batch.append(raw)
        size += raw.size
        if size >= _BATCH_BYTES or len(batch) == _BATCH_ROWS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _bar(located: Located, shown: bool) -> Iterator[Callable[[Raw], None]]:
    """A progress bar by bytes read, of the files' where that is known; nothing where not asked for."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    # On a terminal only: a log would get an empty line instead.
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        known = located.format in ("text", "code") or all(file.endswith((".jsonl", ".json")) for file in located.files)
        total = sum(os.path.getsize(file) for file in located.files) if known and located.files else None
        task = progress.add_task(f"tokenizing {located.name}", total=total)
        yield lambda raw: progress.advance(task, raw.size)
