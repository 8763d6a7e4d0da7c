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
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ithaca.config.schema import Data
from ithaca.data.sources.file_locks import clear_left, locked
from ithaca.data.sources.locate import Located
from ithaca.data.sources.read_records import Raw, open_rows, parse_row, raw_rows
from ithaca.data.tokens.encode import Encoded, Encoder, Kind, find_kind, make_encoder
from ithaca.data.tokens.store import VERSION, Store, StoreWriter, open_store
from ithaca.errors import DataError, RowError
from ithaca.exit_codes import FAILED

NAMED = 5
# The version of how messages become tokens.
CHATS = 2
# As many rows without one good among them are not worth going on.
HOPELESS = 1000
_PEEK, _PEEK_BYTES = 100, 1 << 26
_BATCH_ROWS = 128
# A tokenizer takes about a hundred bytes for each byte that it is given at once.
_BATCH_BYTES = 1 << 19

logger = logging.getLogger("ithaca")


@dataclass(slots=True)
class Count:
    """Rows seen, those that were no documents, the tokens to be learned of the others, and how many of these hold the
    spelling of a special token."""

    rows: int = 0
    bad: int = 0
    named: tuple[str, ...] = ()
    targets: int = 0
    spelled: int = 0

    def add(self, raw: Raw, answer: Encoded | RowError) -> None:
        self.rows += 1
        if isinstance(answer, RowError):
            self.bad += 1
            if len(self.named) < NAMED:
                self.named = (*self.named, f"{raw.place}: {answer}")
        else:
            self.targets += answer.targets
            self.spelled += answer.spelled

    def check(self, located: Located, share: float) -> None:
        """DataError where more rows are bad than the run allows, or where all are."""
        name = located.name
        if not self.rows:
            raise DataError(f"{name} is empty: it holds no rows; type {located.typed.path()}")
        if self.bad == self.rows or self.bad > share * self.rows:
            named = "; ".join(self.named)
            allowed = "no document is left" if self.bad == self.rows else f"data.bad_share allows {share:g} of them"
            raise DataError(
                f"{self.bad:,} of {self.rows:,} rows of {name} are no documents, {allowed}: {named}; mend them, correct "
                f"{located.typed.key('column')} and kind, or raise data.bad_share{located.advice}"
            )

    def notes(self, name: str, kind: str, as_text: bool) -> tuple[str, ...]:
        """A line about the rows that are no documents, and one about spellings of special tokens; none where there are
        none."""
        first = f", the first: {self.named[0]}" if self.named else ""
        bad = f"{self.bad:,} of {self.rows:,} rows of {name} are no documents and are left out{first}"
        what = "became those tokens: data.special_tokens=text leaves them text"
        if as_text or kind.startswith("chat"):
            what = "were taken as text"
        spelled = f"{self.spelled:,} of {self.rows:,} documents of {name} spell special tokens, which {what}"
        return (*([bad] if self.bad else ()), *([spelled] if self.spelled else ()))

    def check_learned(self, located: Located) -> None:
        """DataError where no token is left that a loss could be of."""
        if not self.targets:
            raise DataError(
                f"nothing in {located.name} is to be learned: its documents are of one token, or no token after their first has "
                f"a label other than -100; mend them, or set {located.typed.key('labels')} to the column that has the labels"
            )


def read_template(data: Data) -> str | None:
    """The chat template that the run sets: Jinja itself, or a file that holds it."""
    given = data.chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError, ValueError) as error:
        raise DataError(
            f"data.chat_template {given!r} is no Jinja template and no file that can be read ({error})"
        ) from None


def source_encoder(located: Located, tokenizer: Any, data: Data, template: str | None) -> Encoder:
    """How this source's records become tokens, found out from its first rows."""
    if located.format in ("text", "code"):
        kind = Kind("text", "text")
    else:
        kind = find_kind(located, *_first_records(located, data))
    return make_encoder(kind, tokenizer, located.source, data, template)


def _first_records(located: Located, data: Data) -> tuple[list[Any], str]:
    """Return the first readable records of a source, and the file of the first."""
    count, records, size = Count(), [], 0
    where = ""
    for raw in islice(raw_rows(located, open_rows(located, streaming=data.streaming)), _PEEK):
        try:
            records.append(parse_row(raw))
            where = where or raw.file
            count.rows += 1
        except RowError as error:
            count.add(raw, error)
        size += raw.size
        if size > _PEEK_BYTES:
            break
    count.check(located, share=1.0)
    return records, where


def cache_key(located: Located, tokenizer: Any, data: Data, template: str | None) -> str:
    """A name for what the tokens depend on."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = inner.to_str() if inner is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = template or tokenizer.chat_template
    facts: tuple[Any, ...] = (
        VERSION,
        located.fingerprint(),
        vocabulary,
        str(tokenizer.eos_token),
        repr(template),
        data.learn,
    )
    # Caches from before there was this setting are those of its default.
    facts += () if data.special_tokens == "parse" else (data.special_tokens,)
    # Other tokens that the template sets by name, such as `bos_token`.
    known = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "eos_token"}
    facts += tuple(sorted((name, token) for name, token in known.items() if name in repr(template)))
    facts += ("split",) if getattr(tokenizer, "split_special_tokens", False) else ()
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
            if store is not None and _outdated(store):
                logger.warning(
                    f"{located.name} is tokenized again: its cache is of an earlier version, which took spellings of special "
                    "tokens and weights of messages in another way"
                )
                store = None
            if store is None:
                encoder = source_encoder(located, tokenizer, data, template)
                _write(located, encoder, data, target, progress)
                store = open_store(target)
    except OSError as error:
        # What somebody else tokenized needs no lock to be read.
        store = open_store(target)
        if store is not None and not _outdated(store):
            return _checked(store, located, data)
        raise DataError(
            f"the cache {folder} cannot be written ({error}): make room there, or set data.cache to another folder"
        ) from error
    assert store is not None, f"{target} was written and is not whole"
    return _checked(store, located, data)


def _checked(store: Store, located: Located, data: Data) -> Store:
    """The store itself; DataError where too many of its rows are no documents, or nothing is learned."""
    about = store.about
    count = Count(about["rows"], about["bad"], tuple(about["named"]), about["targets"])
    count.check(located, data.bad_share)
    count.check_learned(located)
    return store


def _outdated(store: Store) -> bool:
    """True for chats of an earlier version, whose messages could end their own turns or were learned at weight 0."""
    about = store.about
    return about["kind"] == "chat" and ("spelled" not in about or about.get("chats", 0) < CHATS)


def _write(located: Located, encoder: Encoder, data: Data, target: Path, progress: bool) -> None:
    # Ids may lie further apart than there are of them.
    writer = StoreWriter.start(target, 1 + max(encoder.tokenizer.get_vocab().values()))
    count = Count()
    try:
        with _bar(located, progress) as bar:
            rows = raw_rows(located, open_rows(located, streaming=False, columns=encoder.columns))
            for raw, answer in encode_rows(rows, encoder, data.workers, bar.within):
                count.add(raw, answer)
                if isinstance(answer, Encoded):
                    writer.add(answer.ids, answer.learn, raw.file, raw.row)
                elif count.bad == count.rows == HOPELESS:
                    count.check(located, share=1.0)
                bar.advance(raw)
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
                "spelled": count.spelled,
                "chats": CHATS,
            }
        )
    except BaseException:
        writer.abandon()
        raise


def encode_batch(
    batch: list[Raw], encoder: Encoder, progress: Callable[[int], None] | None = None
) -> list[tuple[Raw, Encoded | RowError]]:
    """Parse and tokenize some rows together; the answers in the rows' order. What rows hold is let go of on the way."""
    parsed: list[Any] = []
    for place, raw in enumerate(batch):
        try:
            parsed.append(parse_row(raw))
        except RowError as error:
            parsed.append(error)
        batch[place] = raw = Raw(raw.file, raw.row, None, raw.size)
    found = iter(encoder([record for record in parsed if not isinstance(record, RowError)], progress))
    answers = [record if isinstance(record, RowError) else next(found) for record in parsed]
    return list(zip(batch, answers, strict=True))


def encode_rows(
    rows: Iterable[Raw], encoder: Encoder, workers: int, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[Raw, Encoded | RowError]]:
    """All rows in order, by batches; `workers` above 1 are processes, with a few batches under way at a time, which
    say nothing of how far they are within a document."""
    if workers == 1:
        for batch in batches(rows):
            yield from encode_batch(batch, encoder, progress)
        return
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), follow_parent) as pool:
            waiting: list[Future[list[tuple[Raw, Encoded | RowError]]]] = []
            for batch in batches(rows):
                with _unheard(signal.SIGINT):
                    waiting.append(pool.submit(encode_batch, batch, encoder))
                if len(waiting) > 2 * workers:
                    yield from waiting.pop(0).result()
            for future in waiting:
                yield from future.result()
    except BrokenProcessPool:
        raise DataError(
            f"one of the {workers} processes that tokenize was ended (the kernel does that when the machine's memory is "
            "full: look at `dmesg`): set data.workers to fewer"
        ) from None


@contextmanager
def _unheard(number: signal.Signals) -> Iterator[None]:
    """Processes that are started in here do not hear the signal, from their first moment; this one hears it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """Have this process end when the one that started it does, however that ends."""
    parent = parent_process()
    assert parent is not None, "made by a pool"

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(FAILED)

    threading.Thread(target=follow, daemon=True).start()


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


@dataclass(slots=True)
class _Bar:
    """Progress by bytes: of rows that are done, and of letters within a long one that is not."""

    progress: Progress
    task: Any
    ahead: int = 0

    def within(self, letters: int) -> None:
        self.ahead += letters
        self.progress.advance(self.task, letters)

    def advance(self, raw: Raw) -> None:
        taken = min(self.ahead, raw.size)
        self.ahead -= taken
        self.progress.advance(self.task, raw.size - taken)


@contextmanager
def _bar(located: Located, shown: bool) -> Iterator[_Bar]:
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
        yield _Bar(progress, progress.add_task(f"tokenizing {located.name}", total=total))
