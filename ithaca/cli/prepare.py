"""`ithaca prepare`: documents to tokens before a run, with counts, and sample rows with the learned tokens coloured.

The verb writes the cache that `ithaca train` opens: the rows that are shown are the rows that are trained on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ithaca.cli.run_words import load_typed_run
from ithaca.cli.train import check_paths
from ithaca.launch.terminal import print_page, say_loading

if TYPE_CHECKING:
    from torch import Tensor

    from ithaca.config.schema import RunSettings
    from ithaca.data.prepared import Prepared

# Letters of a sample.
_SAMPLE_LETTERS = 1500
_LEARNED, _CONTEXT, _SPECIAL = "green", "dim", "bold magenta"


def prepare(
    words: list[str] = typer.Argument(
        None, metavar="[RUN.YAML] [KEY.SUB=VALUE]...", help="A run file, and settings that override it."
    ),
    show: int = typer.Option(
        0, "--show", metavar="N", min=0, show_default=False, help="Print the first N rows, tokens in the loss in green."
    ),
) -> None:
    """Tokenize a run's documents into its cache, and show the counts."""
    run = load_typed_run(words)
    check_paths(run)
    say_loading("loading the tokenizer and the readers of documents")
    from ithaca.data.prepared import prepare as prepare_data
    from ithaca.models.files.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run.model.tokenizer or run.model.name, run.model.revision)
    prepared = prepare_data(
        run.data,
        tokenizer,
        validation=run.validation,
        seed=run.seed,
        folder=Path(run.data.cache or Path(run.output) / "data"),
        progress=sys.stdout.isatty(),
    )
    if prepared.stores or prepared.others:
        print_page(_sources(prepared), whole=True)
    stores = (*prepared.stores, *prepared.others)
    bad_rows = [f"left out: {named}" for store in stores for named in store.about["named"]]
    for line in (*bad_rows, *prepared.left_out):
        # Not wrapped, so that a path in it can be copied.
        typer.echo(line)
    print_page(_stages(run, prepared), whole=True)

    from ithaca.data.rows.feed import open_feed

    length, rows = run.stages[0].length, run.data.rows
    # A validation split without a document is refused here as in the run; a stream's documents are not known yet.
    if prepared.stores and prepared.has_validation:
        open_feed(prepared, length=length, rows=rows, seed=run.seed, split="validation")
    console = Console()
    feed = open_feed(prepared, length=length, rows=rows, seed=run.seed)
    for index in range(show):
        sample = coloured(feed.row(index), tokenizer, _SAMPLE_LETTERS)
        console.print(Text(feed.describe(index) + "\n", style="bold") + sample)


def _sources(prepared: Prepared) -> Table:
    table = Table(
        "source", "kind", *_right("documents", "tokens", "learned", "longest", "bad rows"), box=None, pad_edge=False
    )
    for store, use in [(store, "") for store in prepared.stores] + [
        (store, " (validation)") for store in prepared.others
    ]:
        about = store.about
        share = about["learned"] / max(about["tokens"], 1)
        longest = int(store.lengths.max(initial=0))
        numbers = [
            f"{about['documents']:,}",
            f"{about['tokens']:,}",
            f"{share:.1%}",
            f"{longest:,}",
            f"{about['bad']:,}",
        ]
        table.add_row(Text(about["name"] + use), about["kind"], *numbers)
    return table


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _stages(run: RunSettings, prepared: Prepared) -> Table:
    """Return a table of rows, fill and epochs of every stage; a stream's rows are not known before it is read."""
    from ithaca.data.rows.feed import open_feed

    table = Table(
        *_right("stage", "length", "rows an epoch", "filled", "rows taken", "epochs"), box=None, pad_edge=False
    )
    for number, stage in enumerate(run.stages):
        feed = open_feed(prepared, length=stage.length, rows=run.data.rows, seed=run.seed + number)
        taken = stage.count * stage.batch
        known = feed.rows_per_epoch
        rows = ("streamed", "-") if known is None else (f"{known:,}", f"{feed.packing_efficiency:.1%}")
        epochs = "-" if known is None else f"{taken / known:.2f}"
        table.add_row(str(number + 1), f"{stage.length:,}", *rows, f"{taken:,}", epochs)
    return table


def coloured(row: dict[str, Tensor], tokenizer: Any, most: int) -> Text:
    """Return a row's text: learned tokens green, other tokens dim, special tokens bold."""
    ids, labels, documents = (row[name][0].tolist() for name in ("input_ids", "labels", "document_ids"))
    special = set(tokenizer.all_special_ids)
    # The first token of a document never has a label: it gets the colour of the second.
    learned = [label >= 0 for label in labels]
    for at in range(len(ids) - 1):
        if at == 0 or documents[at] != documents[at - 1]:
            learned[at] = learned[at + 1] and ids[at] not in special
    text = Text()
    at = 0
    while at < len(ids) and documents[at] >= 0 and len(text) < most:
        # Tokens of one colour are decoded together: a letter may be spread over several tokens.
        colour = (learned[at], documents[at], ids[at] in special)
        end = at + 1
        while end < len(ids) and (learned[end], documents[end], ids[end] in special) == colour:
            end += 1
        style = _LEARNED if learned[at] else _CONTEXT
        text.append(tokenizer.decode(ids[at:end]), f"{_SPECIAL} {style}" if ids[at] in special else style)
        if end < len(ids) and documents[end] != documents[at]:
            text.append("\n" + "-" * 40 + "\n", "dim")
        at = end
    return text + Text(" ...\n" if len(text) >= most else "\n")
