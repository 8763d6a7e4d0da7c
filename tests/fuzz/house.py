"""The undamaged files, made once a session in a folder that cases copy.

    model/       a tiny Llama with its tokenizer          texts/  chats/  tables/   documents of several kinds
    run.yaml     twelve steps over them                   runs/one, runs/two        the same run, stopped after seven and finished
    cache/       its tokens                               calibration/              a machine's measured speeds

Paths inside are relative to the folder, so that a copy is as good as the original.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ithaca.cli.train import train_rank
from ithaca.config.schema import RunSettings, dump_run, read_run
from ithaca.planning.machine.calibrated import Measured, write_measured
from ithaca.planning.machine.hardware import H200
from tests.ranks import run_ranks
from tests.training.runs import _train, documents, export_sum, metrics, tiny_model

STEPS, STOP = 12, 7


def build(root: Path) -> Path:
    """All of it; `root` is empty before."""
    tiny_model(root / "model")
    texts = documents(root / "texts", 24)
    _tables(root / "tables", [file.read_text() for file in sorted(texts.iterdir())])
    _chats(root / "chats")
    (root / "run.yaml").write_text(dump_run(the_run()), encoding="utf-8")
    run_ranks(2, train_in, str(root), "runs/one", stop=STOP)
    run_ranks(2, train_in, str(root), "runs/two")
    write_measured(root / "calibration" / "ithaca" / "machine.json", _measured())
    return root


def the_run(output: str = "runs/one", **stage: Any) -> RunSettings:
    """Its paths are relative: to whichever copy of the folder a rank stands in."""
    return read_run(
        {
            "output": output,
            "model": {"name": "model"},
            "data": {"sources": ["texts"], "cache": "cache"},
            "stages": [{"length": 64, "steps": STEPS, "batch": 4, "lr": 3e-3, "warmup": 2, **stage}],
            "checkpoints": {"save_every": 3, "keep": 2, "background": False},
            "limits": {"hang": 120},
            "launch": {"device": "cpu"},
        }
    )


def train_in(root: str, output: str, stop: int | None = None, **stage: Any) -> dict[str, Any]:
    """On a rank: `ithaca train` with paths relative to `root`; `stop` ends it after so many steps."""
    run = the_run(output, **stage)
    before = Path.cwd()
    os.chdir(root)
    try:
        if stop is not None:
            return _train(run.model_dump_json(), stop=stop)
        status = train_rank(run.model_dump_json())
        # Of a run that is done a journal that was taken away is not written again.
        there = (Path(run.output) / "metrics.jsonl").exists()
        return {"status": status, "metrics": metrics(run) if there else [], "sum": export_sum(run)}
    finally:
        os.chdir(before)


def _tables(folder: Path, texts: list[str]) -> None:
    """The same documents as rows of every kind of file."""
    folder.mkdir()
    lines = "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts))
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "rows.jsonl.bz2").write_bytes(bz2.compress(lines.encode()))
    (folder / "rows.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    table = pyarrow.table({"text": texts, "id": list(range(len(texts))), "note": [None] * len(texts)})
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=5)


def _chats(folder: Path) -> None:
    folder.mkdir()
    turns = [
        ("user", "what is the sea?"),
        ("assistant", "wine-dark."),
        ("user", "and home?"),
        ("assistant", "an isle."),
    ]
    chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for _ in range(8)), encoding="utf-8")


def _measured() -> Measured:
    known = asdict(H200)
    kept = {name: known[name] for name in ("name", "memory", "matmul", "bandwidth", "host_copy")}
    return Measured(**kept, attention=H200.attention, torch="2.11.0")
