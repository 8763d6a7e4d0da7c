"""`ithaca prepare`: documents to tokens ahead of a run, what came of them, and samples with the learned tokens coloured.

It makes the cache that `ithaca train` opens, so what it shows is what will be trained on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ithaca.cli.train import check_places, split_words
from ithaca.launch.terminal import print_page, say_loading

if TYPE_CHECKING:
    from torch import Tensor

    from ithaca.config.schema import Run
    from ithaca.data.prepared import Prepared

_SHOWN = 1500
_LEARNED, _GIVEN, _SPECIAL = "green", "dim", "bold magenta"


def prepare(
    words: list[str] = typer.Argument(None, metavar="[RUN.YAML] [KEY.SUB=VALUE]...", help="A run file; settings."),
    show: int = typer.Option(
        0, "--show", metavar="N", min=0, show_default=False, help="Print N rows, learned tokens in green."
    ),
) -> None:
    """Tokenize a run's documents into its cache, and say what came of them."""
    from ithaca.config.schema import load_run

    file, overrides = split_words(words or [])
    run = load_run(file, overrides)
    check_places(run)
    say_loading("loading the tokenizer and what reads documents")
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
    for line in (*_bad_rows(prepared), *prepared.left_out):
        # Whole, so that a path in it can be copied.
        typer.echo(line)
    print_page(_stages(run, prepared), whole=True)
    _check_validation(run, prepared)
    console = Console()
    for index in range(show):
        console.print(_sample(run, prepared, tokenizer, index))


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


def _check_validation(run: Run, prepared: Prepared) -> None:
    """Refuse, as the run will, a validation for which no document is held back; a stream's is not known yet."""
    from ithaca.data.rows.feed import open_feed

    if prepared.stores and prepared.has_validation:
        open_feed(prepared, length=run.stages[0].length, rows=run.data.rows, seed=run.seed, split="validation")


def _bad_rows(prepared: Prepared) -> list[str]:
    stores = (*prepared.stores, *prepared.others)
    return [f"left out: {named}" for store in stores for named in store.about["named"]]


def _stages(run: Run, prepared: Prepared) -> Table:
    """Rows and their fill, stage by stage; a stream's rows are not known before they are read."""
    from ithaca.data.rows.feed import open_feed

    table = Table(
        *_right("stage", "length", "rows an epoch", "filled", "rows taken", "epochs"), box=None, pad_edge=False
    )
    for number, stage in enumerate(run.stages):
        feed = open_feed(prepared, length=stage.length, rows=run.data.rows, seed=run.seed + number)
        taken = stage.count * stage.batch
        known = feed.rows_per_epoch
        told = ("streamed", "-") if known is None else (f"{known:,}", f"{feed.fill:.1%}")
        epochs = "-" if known is None else f"{taken / known:.2f}"
        table.add_row(str(number + 1), f"{stage.length:,}", *told, f"{taken:,}", epochs)
    return table


def _sample(run: Run, prepared: Prepared, tokenizer: Any, index: int) -> Text:
    from ithaca.data.rows.feed import open_feed

    feed = open_feed(prepared, length=run.stages[0].length, rows=run.data.rows, seed=run.seed)
    return Text(feed.describe(index) + "\n", style="bold") + coloured(feed.row(index), tokenizer, _SHOWN)


def coloured(row: dict[str, Tensor], tokenizer: Any, most: int) -> Text:
    """A row's text: learned tokens green, the others dim, special ones bold; runs of one colour are decoded whole."""
    ids, labels, documents = (row[name][0].tolist() for name in ("input_ids", "labels", "document_ids"))
    special = set(tokenizer.all_special_ids)
    # A document's first token has no label, whatever stands there: it is shown as its neighbour is.
    learned = [label >= 0 for label in labels]
    for place in range(len(ids) - 1):
        if place == 0 or documents[place] != documents[place - 1]:
            learned[place] = learned[place + 1] and ids[place] not in special
    text = Text()
    place = 0
    while place < len(ids) and documents[place] >= 0 and len(text) < most:
        alike = (learned[place], documents[place], ids[place] in special)
        end = place + 1
        while end < len(ids) and (learned[end], documents[end], ids[end] in special) == alike:
            end += 1
        style = _LEARNED if alike[0] else _GIVEN
        text.append(tokenizer.decode(ids[place:end]), f"{_SPECIAL} {style}" if alike[2] else style)
        if end < len(ids) and documents[end] != documents[place]:
            text.append("\n" + "-" * 40 + "\n", "dim")
        place = end
    return text + Text(" ...\n" if len(text) >= most else "\n")
