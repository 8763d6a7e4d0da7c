"""A source's documents, tokenized once into a store and opened from there afterwards.

The store's name is a hash of all that the tokens depend on: the files' names, sizes and times, the tokenizer, the chat
template, the loss mask. If many processes ask at once, the holder of a file lock tokenizes and the other ones wait.

Invariant: bad rows are counted and the first few named; more than `bad_share` of them is a DataError.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ithaca.config.schema import DataSettings
from ithaca.data.sources.file_locks import clear_leftovers, locked
from ithaca.data.sources.locate import FoundSource
from ithaca.data.sources.read_records import RawRow, open_rows, parse_row, raw_rows
from ithaca.data.tokens.document_kinds import DocumentKind, find_kind
from ithaca.data.tokens.encode import Encoded, Encoder, make_encoder
from ithaca.data.tokens.encode_rows import encode_rows
from ithaca.data.tokens.row_counts import RowCounts
from ithaca.data.tokens.store import VERSION, Store, StoreWriter, open_store
from ithaca.errors import DataError, RowError

# Version of the way in which messages become tokens.
CHATS = 2
# Rows, all of them bad, after which a source is refused without reading on.
HOPELESS = 1000
# Rows, and bytes, that are read to find the kind of the documents.
_PEEK, _PEEK_BYTES = 100, 1 << 26

logger = logging.getLogger("ithaca")


def read_template(data: DataSettings) -> str | None:
    """Return the run's chat template: Jinja itself, or the content of a file."""
    given = data.chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError, ValueError) as error:
        raise DataError(
            f"data.chat_template {given!r} is no Jinja template and no file that can be read ({error})"
        ) from None


def source_encoder(located: FoundSource, tokenizer: Any, data: DataSettings, template: str | None) -> Encoder:
    """Make the encoder of a source; its first rows decide the kind."""
    if located.format in ("text", "code"):
        kind = DocumentKind("text", "text")
    else:
        kind = find_kind(located, *_first_records(located, data))
    return make_encoder(kind, tokenizer, located.source, data, template)


def _first_records(located: FoundSource, data: DataSettings) -> tuple[list[Any], str]:
    """Return the first readable records of a source, and the file of the first."""
    count, records, size = RowCounts(), [], 0
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
    # At least one row must be readable to find the kind.
    count.check(located, share=1.0)
    return records, where


def cache_key(located: FoundSource, tokenizer: Any, data: DataSettings, template: str | None) -> str:
    """Return a hash of all that the tokens depend on."""
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
    # Left out at its default: caches of earlier versions, without this setting, stay valid.
    facts += () if data.special_tokens == "parse" else (data.special_tokens,)
    # Other tokens that the template names, such as `bos_token`.
    known = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "eos_token"}
    facts += tuple(sorted((name, token) for name, token in known.items() if name in repr(template)))
    facts += ("split",) if getattr(tokenizer, "split_special_tokens", False) else ()
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def tokenize_source(located: FoundSource, tokenizer: Any, data: DataSettings, folder: Path, *, progress: bool) -> Store:
    """Return the store of a source; tokenize the source if there is none."""
    template = read_template(data)
    target = folder / cache_key(located, tokenizer, data, template)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder)
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
        # A store in a read-only folder needs no lock.
        store = open_store(target)
        if store is not None and not _outdated(store):
            return _checked(store, located, data)
        raise DataError(
            f"the cache {folder} cannot be written ({error}): make room there, or set data.cache to another folder"
        ) from error
    assert store is not None, f"{target} was written and is not whole"
    return _checked(store, located, data)


def _checked(store: Store, located: FoundSource, data: DataSettings) -> Store:
    """Return the store; DataError if too many of its rows are bad, or nothing is learned."""
    about = store.about
    count = RowCounts(about["rows"], about["bad"], tuple(about["named"]), about["targets"])
    count.check(located, data.bad_share)
    count.check_learned(located)
    return store


def _outdated(store: Store) -> bool:
    """True for chats of an earlier version, whose messages could end their own turns or were learned at weight 0."""
    about = store.about
    return about["kind"] == "chat" and ("spelled" not in about or about.get("chats", 0) < CHATS)


def _write(located: FoundSource, encoder: Encoder, data: DataSettings, target: Path, progress: bool) -> None:
    # Ids may have gaps: the largest id counts, not the number of tokens.
    writer = StoreWriter.start(target, 1 + max(encoder.tokenizer.get_vocab().values()))
    count = RowCounts()
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


@dataclass(slots=True)
class _ProgressBar:
    """Progress by bytes: of finished rows, and of letters within a long row that is not finished."""

    progress: Progress
    task: Any
    unfinished: int = 0

    def within(self, letters: int) -> None:
        self.unfinished += letters
        self.progress.advance(self.task, letters)

    def advance(self, raw: RawRow) -> None:
        taken = min(self.unfinished, raw.size)
        self.unfinished -= taken
        self.progress.advance(self.task, raw.size - taken)


@contextmanager
def _bar(located: FoundSource, shown: bool) -> Iterator[_ProgressBar]:
    """Show a progress bar by bytes read, with their total if the files' sizes are known; nothing if not asked for."""
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
        yield _ProgressBar(progress, progress.add_task(f"tokenizing {located.name}", total=total))
