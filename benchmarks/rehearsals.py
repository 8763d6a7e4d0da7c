"""Rehearsals on one GPU, cell by cell: the plan against them, a capped card, scaling, and a whole rank at 1M tokens.

    python -m benchmarks.rehearsals results/rehearsals.json --groups plan,capped,matched,scaling,whole --total 1500
    python -m benchmarks.rehearsals results/rehearsals.json --plot docs/rehearsals.png

plan     five models x (sp, length): memory and computing time, planned and rehearsed; AdamW in bf16, so that 8B fits
         one card with its optimizer; the mixture of experts is Qwen3-30B-A3B's widths with six layers; Qwen3-8B at 1M is
         the whole rank below
capped   Qwen3-4B, sp=4, a card of 80 GB, fp32 weights with AdamW, states on the host: peak reserved in GB of 1e9 and
         tokens a second
matched  the same with states on the device, in as much memory as the published run took
scaling  Qwen3-4B at 128K over sp = 1 to 32: tokens a second of a GPU against sp=1's; exchanges predicted
whole    Qwen3-8B, sp=8, 1,048,576 tokens: every layer of the rank run

Each cell is an `ithaca rehearse` under a time limit: one rank under a process group of one process, few layers where the
whole would take long, the rest derived and marked so. Cells of one model that differ in length and sp alone follow each
other in one process, which imports and compiles once: that is most of a short rehearsal. One that fails or takes too long
ends its process. The program goes on where it stopped: the JSON is written
after every cell, and what is in it, in this group or another, is not run again unless it failed, would be planned
otherwise today, or --again is given. What the plan says of a cell is always today's. Without --groups nothing runs, and
tables and plot are made from the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import closing
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from select import select
from typing import Any

from benchmarks.rehearsal_cells import GROUPS, Cell, asked, cells_of, key, name_of, sort_of
from benchmarks.rehearsal_page import TABLES, detail, plot
from benchmarks.rehearsal_plan import experts_config, planned_anew
from benchmarks.stamps import mark, mark_like, save
from benchmarks.step import ALLOCATOR, LEAST_S, command_line, load

# A process that holds more after a rehearsal, on the device or pinned on the host, takes no other one: the next would
# count it, or plan with less.
HELD = 256 * 2**20
# What rehearsals import sooner or later.
IMPORTED = (
    "ithaca.rehearse.rehearsal",
    "torch._inductor.compile_fx",
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "qwen3", "qwen3_moe")),
)
KEPT = (
    "here", "torch", "machine", "how", "plan_summary", "degrees", "rows", "length", "seconds", "peaks", "kinds",
    "reserved", "pinned", "host", "exchanges", "link", "peak", "compute_s", "step_s", "memory_error", "time_error", "derived",
)  # fmt: skip


def words_of(of: Cell, model: str, answer: Path, extra: list[str]) -> list[str]:
    """Return the words after `ithaca` on the command line; `model` is a name or a folder in its place."""
    words = ["rehearse", *of["settings"], "--model", model]
    words += ["--length", str(of["length"]), "--world", str(of["sp"]), "--json", str(answer)]
    return [*words, *of["options"], *extra]


class Rehearser:
    """A process that rehearses cell after cell of one sort: it imports and compiles once."""

    def __init__(self) -> None:
        self.sort: Any = None
        self.holds = 0
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "benchmarks.rehearsals", "-", "--serve"]
        # torch is imported before the command line, which would choose the same, has the word.
        environment = os.environ | ALLOCATOR
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, env=environment
        )

    def run(self, words: list[str], limit: float) -> tuple[int, str]:
        """The rehearsal's status and what it said on stderr; raises TimeoutExpired after `limit` seconds."""
        process, before = self.process, self.errors.seek(0, os.SEEK_END)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        if not select([process.stdout], [], [], limit)[0]:
            raise subprocess.TimeoutExpired(words, limit)
        answer = process.stdout.readline()
        status, self.holds = map(int, answer.split()) if answer else (process.wait(), 0)
        self.errors.seek(before)
        return status, self.errors.read()

    def close(self) -> None:
        with self.errors, self.process:
            self.process.kill()


class Rehearsers:
    """The one at work, and the next, which imports meanwhile."""

    def __init__(self) -> None:
        self.now, self.next = Rehearser(), Rehearser()

    def run(self, of: Cell, words: list[str], limit: float) -> tuple[int, str]:
        if self.now.sort not in (None, sort_of(of)):
            self._change()
        self.now.sort = sort_of(of)
        status = None
        try:
            status, said = self.now.run(words, limit)
            return status, said
        finally:
            # After a failure nobody knows what it still holds.
            if status != 0 or self.now.holds > HELD:
                self._change()

    def _change(self) -> None:
        self.now.close()
        self.now, self.next = self.next, Rehearser()

    def close(self) -> None:
        self.now.close()
        self.next.close()


def serve() -> None:
    """Run commands: words arrive line by line; a status and the memory still held go back for each."""
    for name in IMPORTED:
        importlib.import_module(name)
    from ithaca.cli import main
    from ithaca.models.layers.fuse import compiled_once

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with compiled_once():
        for line in sys.stdin:
            sys.argv = ["ithaca", *json.loads(line)]
            try:
                main()
                status = 0
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except Exception:
                traceback.print_exc()
                status = 1
            sys.stderr.flush()
            print(status, _held(), file=answers, flush=True)


def _held() -> int:
    """Bytes of the device and of pinned memory that a rehearsal left behind; libraries keep some."""
    import torch

    from ithaca.memory.release import release

    if not torch.cuda.is_initialized():
        return 0
    release(torch.device("cuda"))
    return torch.cuda.memory_allocated() + torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def run_cell(of: Cell, limit: float, extra: list[str], rehearsers: Rehearsers) -> Cell:
    """The cell's result, or how its process ended."""
    with tempfile.TemporaryDirectory() as folder:
        answer, started = Path(folder, "answer.json"), time.monotonic()
        model = of["model"]
        if model == "experts":
            model = write_experts(Path(folder))
        try:
            status, said = rehearsers.run(of, words_of(of, model, answer, extra), limit)
            got: Cell = {"outcome": "failed", "error": said.strip()[-3000:]} if status else {"outcome": "done"}
        except subprocess.TimeoutExpired:
            got = {"outcome": "over the limit", "error": f"not done after {limit:.0f} s"}
        if answer.exists():
            told = json.loads(answer.read_text())
            got |= {name: told[name] for name in KEPT}
            got["predicted"] = {name: told["predicted"][name] for name in ("job", "plan", "budgets", "kinds")}
            got |= {name: told[name] for name in ("figures", "bare")}
        return got | {"spent_s": time.monotonic() - started}


def write_experts(folder: Path) -> str:
    Path(folder, "config.json").write_text(json.dumps(experts_config()))
    return str(folder)


def run_all(cells: list[Cell], result: dict[str, Any], arguments: argparse.Namespace, rehearsers: Rehearsers) -> None:
    started = time.monotonic()
    settled = set() if arguments.again else {key(c) for c in result["cells"] if holds(c)}
    for of in cells:
        left = arguments.total - (time.monotonic() - started)
        if key(of) in settled or left < LEAST_S:
            print(f"{'there' if key(of) in settled else 'left'}: {name_of(of)}", flush=True)
            continue
        same = [c for c in result["cells"] if asked(c) == asked(of) and holds(c)]
        if same and not arguments.again:
            got = same[0]
        else:
            got = run_cell(of, min(arguments.limit, left), arguments.extra.split(), rehearsers)
        if got["outcome"] == "over the limit" and left < arguments.limit:
            print(f"left: {name_of(of)}", flush=True)
            continue
        done = planned_anew(got | of)
        if (run := about()) not in result["runs"]:
            result["runs"].append(run)
        result["cells"] = [*(c for c in result["cells"] if key(c) != key(of)), done]
        if same and not arguments.again:
            mark_like(result, done, same[0])
        else:
            mark(result, "rehearsals", done)
        save(arguments.file, result)
        print(detail(done), flush=True)


def holds(of: Cell) -> bool:
    """True if a cell was run, and would be planned the same today."""
    return of["outcome"] == "done" and bool(of["planned_so_today"])


def about() -> dict[str, str]:
    """Command and versions, without touching the device; its name is in every cell."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "triton") if find_spec(name)}
    return {"command": command_line(), "python": platform.python_version(), **versions}


def _named(of: Cell, texts: str) -> bool:
    return any(text in name_of(of) for text in texts.split("|"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the JSON, read and written")
    parser.add_argument("--groups", default="", help=",".join(GROUPS))
    parser.add_argument("--only", default="", help="cells whose name has this text, or one of several, as in '8K|96K'")
    parser.add_argument("--without", help="not those whose name has this text, or one of several")
    parser.add_argument("--limit", type=float, default=560, help="seconds for a cell")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds for all; the rest waits")
    parser.add_argument("--again", action="store_true", help="also run the cells that the file has")
    parser.add_argument("--extra", default="", help="options for every rehearsal, such as '--layers 2'")
    parser.add_argument("--plot", type=Path, help="also draw the plan against rehearsals, into this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return 0
    result = load(arguments.file)
    result["cells"] = [planned_anew(of) for of in result["cells"]]
    cells = [of for group in filter(None, arguments.groups.split(",")) for of in cells_of(group)]
    wanted = [of for of in cells if _named(of, arguments.only)]
    if arguments.without:
        wanted = [of for of in wanted if not _named(of, arguments.without)]
    if wanted:
        with closing(Rehearsers()) as rehearsers:
            run_all(wanted, result, arguments, rehearsers)
    if result["cells"]:
        save(arguments.file, result)
    if arguments.plot:
        plot(result["cells"], arguments.plot)
    for table in TABLES.values():
        print(f"\n{table(result['cells'])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
