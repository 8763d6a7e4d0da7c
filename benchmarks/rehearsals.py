"""Rehearsals on one GPU, cell by cell: the plan against them, a capped card, scaling, and a whole rank at 1M tokens.

    python -m benchmarks.rehearsals results/rehearsals.json --groups plan,capped,matched,scaling,whole --total 1500
    python -m benchmarks.rehearsals results/rehearsals.json --plot docs/rehearsals.png --page docs/rehearse.md

plan     five models x (sp, length): memory and computing time, planned and rehearsed; AdamW in bf16, so that 8B fits
         one card with its optimizer; the mixture of experts is Qwen3-30B-A3B's widths with six layers
capped   Qwen3-4B, sp=4, a card of 80 GB, fp32 weights with AdamW, states on the host: peak reserved in GB of 1e9 and
         tokens a second
matched  the same with states on the device, in as much memory as the published run took
scaling  Qwen3-4B at 128K over sp = 1 to 32: tokens a second of a GPU against sp=1's; exchanges predicted
whole    Qwen3-8B, sp=8, 1,048,576 tokens: every layer of the rank run

Each cell is an `ithaca rehearse` in a process of its own under a time limit: one rank under a process group of one
process, few layers where the whole would take long, the rest derived and marked so. The next cell's process imports what
it needs while this one runs; that is most of a short rehearsal. The program goes on where it stopped: the JSON is written
after every cell, and what is in it, in this group or another, is not run again unless it failed or --again is given.
Without --groups nothing runs, and tables and plot are made from the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.step import ALLOCATOR, LEAST_S, command_line, load, parse_length, save, show_length

Cell = dict[str, Any]
# What rehearsals import sooner or later.
IMPORTED = (
    "ithaca.proof.rehearse",
    "torch._inductor.compile_fx",
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "qwen3", "qwen3_moe")),
)
GB = 1e9
MODELS = ("meta-llama/Llama-3.2-1B", "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "experts")
SHAPES = ((1, "32K"), (1, "128K"), (4, "128K"), (8, "512K"), (8, "1M"))
EXPERTS, EXPERT_LAYERS = "Qwen/Qwen3-30B-A3B", 6
BF16 = ("precision=bf16", "optimizer.name=adamw")
MIXED = ("precision=mixed", "optimizer.name=adamw")
# Length: the published peak in GB and tokens/s (Hugging Face's post on Ulysses); at 128K it ran out of memory.
PUBLISHED: dict[str, tuple[float, int | None]] = {
    "8K": (23.4, 3933),
    "32K": (35.0, 7733),
    "64K": (50.5, 13396),
    "96K": (66.0, None),
}
# Length: budget in GB, or three quarters of the card; and what is on the host.
CAPPED: dict[str, tuple[float | None, str]] = {
    "8K": (10.5, "everything"),
    "32K": (13.0, "everything"),
    "64K": (16.0, "everything"),
    "96K": (18.0, "everything"),
    "128K": (None, "nothing"),
    "1M": (None, "everything"),
}
# Of a published peak: what is left to the allocator and to kernels.
MATCHED_SHARE = 0.96
KEPT = (
    "here", "torch", "machine", "how", "plan_summary", "degrees", "rows", "length", "seconds", "peaks", "kinds",
    "reserved", "pinned", "host", "exchanges", "link", "peak", "compute_s", "step_s", "memory_error", "time_error", "derived",
)  # fmt: skip


def cell(group: str, model: str, sp: int, length: str, *settings: str, options: tuple[str, ...] = ()) -> Cell:
    return {
        "group": group, "model": model, "sp": sp, "length": parse_length(length),
        "settings": [*settings, f"mesh.sp={sp}"], "options": list(options),
    }  # fmt: skip


def cells_of(group: str) -> list[Cell]:
    """What a group consists of, the quick cells first."""
    if group == "plan":
        return [cell("plan", model, sp, length, *BF16) for sp, length in SHAPES for model in MODELS]
    if group == "capped":
        return [_on_80_gb("capped", length, *how) for length, how in CAPPED.items()]
    if group == "matched":
        return [_on_80_gb("matched", at, MATCHED_SHARE * peak, "nothing") for at, (peak, _) in PUBLISHED.items()]
    if group == "scaling":
        return [cell("scaling", "Qwen/Qwen3-4B", sp, "128K", *BF16) for sp in (1, 2, 4, 8, 16, 32)]
    if group == "whole":
        options = ("--layers", "all")
        settings = (*MIXED, "memory.on_host=everything", "memory.budget=36GB")
        return [cell("whole", "Qwen/Qwen3-8B", 8, "1M", *settings, options=options)]
    raise SystemExit(f"--groups {group}: choose among {', '.join(TABLES)}")


def _on_80_gb(group: str, length: str, budget: float | None, on_host: str) -> Cell:
    settings = (*MIXED, f"memory.on_host={on_host}", *([f"memory.budget={budget:.1f}GB"] if budget else []))
    return cell(group, "Qwen/Qwen3-4B", 4, length, *settings, options=("--cap", "80GB"))


def key(of: Cell) -> str:
    return json.dumps([of["group"], asked(of)])


def asked(of: Cell) -> list[Any]:
    """What is rehearsed; two groups may have the same."""
    return [of[name] for name in ("model", "sp", "length", "settings", "options")]


def words_of(of: Cell, model: str, answer: Path, extra: list[str]) -> list[str]:
    """What is typed after `ithaca`; `model` is a name or the folder that stands for it."""
    words = ["rehearse", *of["settings"], "--model", model]
    words += ["--length", str(of["length"]), "--world", str(of["sp"]), "--json", str(answer)]
    return [*words, *of["options"], *extra]


class Waiting:
    """A process that waits for the words of a rehearsal, and after them another one."""

    def __init__(self) -> None:
        self.next = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.rehearsals", "-", "--wait"]
        pipe = subprocess.PIPE
        # torch is imported before the command line, which would choose the same, has the word.
        environment = os.environ | {"PYTORCH_ALLOC_CONF": ALLOCATOR}
        return subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True, env=environment)

    def run(self, words: list[str], limit: float) -> tuple[int, str]:
        """Its status and what it said on stderr; raises TimeoutExpired after `limit` seconds."""
        process, self.next = self.next, self._start()
        with process:
            try:
                _, said = process.communicate(json.dumps(words) + "\n", timeout=limit)
            finally:
                process.kill()
        return process.returncode, said

    def close(self) -> None:
        with self.next as process:
            process.kill()


def wait() -> None:
    """What a waiting process does."""
    for name in IMPORTED:
        importlib.import_module(name)
    from ithaca.cli import main

    line = sys.stdin.readline()
    if line:
        sys.argv = ["ithaca", *json.loads(line)]
        main()


def run_cell(of: Cell, limit: float, extra: list[str], waiting: Waiting) -> Cell:
    """The cell's result, or how its process ended."""
    with tempfile.TemporaryDirectory() as folder:
        answer, started = Path(folder, "answer.json"), time.monotonic()
        model = of["model"]
        if model == "experts":
            model = write_experts(Path(folder))
        try:
            status, said = waiting.run(words_of(of, model, answer, extra), limit)
            got: Cell = {"outcome": "failed", "error": said.strip()[-3000:]} if status else {"outcome": "done"}
        except subprocess.TimeoutExpired:
            got = {"outcome": "over the limit", "error": f"not done after {limit:.0f} s"}
        if answer.exists():
            told = json.loads(answer.read_text())
            got |= {name: told[name] for name in KEPT}
            got["predicted"] = {
                name: told["predicted"][name] for name in ("device_bytes", "kinds", "compute_s", "step_s")
            } | {"host_bytes": sum(term["host_bytes"] for term in told["predicted"]["memory"]["terms"])}
            got |= {name: told[name] for name in ("figures", "bare")}
        return got | {"spent_s": time.monotonic() - started}


def write_experts(folder: Path) -> str:
    """A mixture of experts that fits one card with its optimizer."""
    from ithaca.planning.known_models import known_config

    config = known_config(EXPERTS)
    assert config is not None
    text = json.dumps(config | {"num_hidden_layers": EXPERT_LAYERS, "architectures": ["Qwen3MoeForCausalLM"]})
    Path(folder, "config.json").write_text(text)
    return str(folder)


def run_all(cells: list[Cell], result: dict[str, Any], arguments: argparse.Namespace, waiting: Waiting) -> None:
    started = time.monotonic()
    settled = set() if arguments.again else {key(c) for c in result["cells"] if c["outcome"] == "done"}
    for of in cells:
        left = arguments.total - (time.monotonic() - started)
        if key(of) in settled or left < LEAST_S:
            print(f"{'there' if key(of) in settled else 'left'}: {name_of(of)}", flush=True)
            continue
        same = [c for c in result["cells"] if asked(c) == asked(of) and c["outcome"] == "done"]
        if same and not arguments.again:
            got = same[0]
        else:
            got = run_cell(of, min(arguments.limit, left), arguments.extra.split(), waiting)
        if got["outcome"] == "over the limit" and left < arguments.limit:
            print(f"left: {name_of(of)}", flush=True)
            continue
        done = got | of
        if (run := about()) not in result["runs"]:
            result["runs"].append(run)
        result["cells"] = [*(c for c in result["cells"] if key(c) != key(of)), done]
        save(arguments.file, result)
        print(detail(done), flush=True)


def about() -> dict[str, str]:
    """Command and versions, without touching the device; its name is in every cell."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "triton") if find_spec(name)}
    return {"command": command_line(), "python": platform.python_version(), **versions}


def name_of(of: Cell) -> str:
    return f"{of['group']}: {short_name(of)}, sp={of['sp']}, {show_length(of['length'])}"


def short_name(of: Cell) -> str:
    if of["model"] == "experts":
        return f"{EXPERTS.rsplit('/', 1)[-1]}, {EXPERT_LAYERS} layers"
    return str(of["model"].rsplit("/", 1)[-1])


def detail(of: Cell) -> str:
    if of["outcome"] != "done":
        return f"{name_of(of)}: {of['outcome']}: {of.get('error', '').strip().splitlines()[-1:]}"
    spent = "" if of["step_s"] is None else f"{of['step_s']:.2f} s a step, "
    off = "" if of["time_error"] is None else f", time {of['time_error']:+.1%}"
    return (
        f"{name_of(of)}: {spent}{of['peak'] / GB:.2f} GB, {of['reserved'] / GB:.2f} reserved, plan's memory "
        f"{of['memory_error']:+.1%}{off}; {of['how']}; {of['spent_s']:.0f} s"
    )


def plan_table(cells: list[Cell]) -> str:
    """Plan against rehearsal, every cell, and the worst of them."""
    heads = ("model", "sp", "tokens", "peak, GB", "plan", "off", "computing, s", "plan", "off", "layers")
    rows: list[tuple[str, ...]] = []
    order = [key(of) for of in cells_of("plan")]
    done = sorted((c for c in cells if c["group"] == "plan"), key=lambda c: order.index(key(c)))
    for c in done:
        start = (short_name(c), str(c["sp"]), show_length(c["length"]))
        if c["outcome"] != "done":
            rows.append((*start, c["outcome"], "", "", "", "", "", ""))
            continue
        said = c["predicted"]
        memory = (f"{c['peak'] / GB:.2f}", f"{said['device_bytes'] / GB:.2f}", f"{c['memory_error']:+.1%}")
        spent = ("", "", "")
        if c["time_error"] is not None:
            spent = (f"{c['compute_s']:.2f}", f"{said['compute_s']:.2f}", f"{c['time_error']:+.1%}")
        rows.append((*start, *memory, *spent, "derived" if c["derived"] else "all run"))
    worst = [_worst(done, error) for error in ("memory_error", "time_error")]
    missing = len(order) - len(done)
    rest = f"{missing} of {len(order)} cells have no result yet." if missing else ""
    return "\n".join([_markdown(heads, rows), "", *filter(None, [*worst, rest])])


def _worst(cells: list[Cell], error: str) -> str:
    known = [c for c in cells if c["outcome"] == "done" and c[error] is not None]
    if not known:
        return ""
    most = max(known, key=lambda c: abs(c[error]))
    return f"Worst of {len(known)}, {error.replace('_', ' ')}: {most[error]:+.1%} ({name_of(most).split(': ')[1]})."


def capped_table(cells: list[Cell], group: str = "capped") -> str:
    """Memory and speed beside what was published."""
    heads = (
        "tokens",
        "reserved, GB",
        "published",
        "peak, GB",
        "host, GB",
        "tokens/s",
        "published",
        "step, s",
        "layers",
    )
    rows = []
    for c in sorted((c for c in cells if c["group"] == group), key=lambda c: c["length"]):
        length = show_length(c["length"])
        published, speed = PUBLISHED.get(length, (None, None))
        if c["outcome"] != "done":
            rows.append((length, c["outcome"], *[""] * 7))
            continue
        tokens = "" if c["step_s"] is None else f"{c['length'] / c['step_s']:,.0f}"
        step = "" if c["step_s"] is None else f"{c['step_s']:.2f}"
        there, fast = f"{published:.1f}" if published else "ran out", f"{speed:,}" if speed else ""
        figures = (f"{c['reserved'] / GB:.2f}", there, f"{c['peak'] / GB:.2f}", f"{c['host'] / GB:.1f}")
        rows.append((length, *figures, tokens, fast, step, "derived" if c["derived"] else "all run"))
    return _markdown(heads, rows)


def scaling_table(cells: list[Cell]) -> str:
    """Tokens a second of one GPU at every sp, against sp=1's."""
    done = [c for c in cells if c["group"] == "scaling" and c["outcome"] == "done" and c["step_s"]]
    done.sort(key=lambda c: c["sp"])
    rows = []
    for c in done:
        each = [x["length"] / x["step_s"] / x["sp"] for x in (done[0], c)]
        wire = sum(exchange["seconds"] for exchange in c["exchanges"])
        exchange = f"{wire:.2f} (predicted, {c['link']})"
        speed, share = f"{c['length'] / c['step_s']:,.0f}", f"{each[1] / each[0]:.1%}"
        rows.append((str(c["sp"]), f"{c['step_s']:.2f}", f"{c['compute_s']:.2f}", exchange, speed, share))
    return _markdown(("sp", "step, s", "computing, s", "exchanges, s", "tokens/s", "efficiency"), rows)


def _markdown(heads: tuple[str, ...], rows: list[Any]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def whole_table(cells: list[Cell]) -> str:
    """The whole rank at a million tokens."""
    heads = ("model", "sp", "tokens", "step, s", "computing, s", "reserved, GB", "peak, GB", "host, GB")
    rows = []
    for c in cells:
        if c["group"] == "whole" and c["outcome"] == "done":
            spent = (f"{c['step_s']:.1f}", f"{c['compute_s']:.1f}")
            memory = (f"{c[name] / GB:.1f}" for name in ("reserved", "peak", "host"))
            rows.append((short_name(c), str(c["sp"]), f"{c['length']:,}", *spent, *memory))
    return _markdown(heads, rows)


TABLES: dict[str, Callable[[list[Cell]], str]] = {
    "plan": plan_table,
    "capped": capped_table,
    "matched": partial(capped_table, group="matched"),
    "scaling": scaling_table,
    "whole": whole_table,
}


def put_into(page: str, cells: list[Cell]) -> str:
    """The page with every table for which it has marks, `<!-- plan -->` to `<!-- end -->`, made anew."""
    for name, table in TABLES.items():
        made = f"<!-- {name} -->\n{table(cells)}\n<!-- end -->"
        page = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, made=made: made, page, flags=re.DOTALL)
    return page


def plot(cells: list[Cell], file: Path) -> None:
    """Planned against rehearsed, memory and time, around the line where both are the same."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    done = [c for c in cells if c["group"] == "plan" and c["outcome"] == "done"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6))
    pairs = {
        "peak memory, GB": [(c, c["peak"] / GB, c["predicted"]["device_bytes"] / GB) for c in done],
        "computing a step, s": [
            (c, c["compute_s"], c["predicted"]["compute_s"]) for c in done if c["time_error"] is not None
        ],
    }
    for axis, (title, points), within in zip(axes, pairs.items(), (0.05, 0.1), strict=True):
        for model in dict.fromkeys(short_name(c) for c, _, _ in points):
            own = [(x, y) for c, x, y in points if short_name(c) == model]
            axis.plot(*zip(*own, strict=True), marker="o", linestyle="none", label=model)
        ends = [min((x for _, x, _ in points), default=1), max((x for _, x, _ in points), default=2)]
        axis.plot(ends, ends, color="gray", linewidth=1)
        low, high = ([end * (1 + sign * within) for end in ends] for sign in (-1, 1))
        axis.fill_between(ends, low, high, color="gray", alpha=0.2, linewidth=0, label=f"within {within:.0%}")
        axis.set(title=title, xlabel="rehearsed", ylabel="planned", xscale="log", yscale="log")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_minor_locator(NullLocator())
            side.set_major_formatter(StrMethodFormatter("{x:g}"))
        if points:
            axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _named(of: Cell, texts: str) -> bool:
    return any(text in name_of(of) for text in texts.split("|"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the JSON, read and written")
    parser.add_argument("--groups", default="", help="plan,capped,matched,scaling,whole")
    parser.add_argument("--only", default="", help="cells whose name has this text, or one of several, as in '8K|96K'")
    parser.add_argument("--without", help="not those whose name has this text, or one of several")
    parser.add_argument("--limit", type=float, default=560, help="seconds for a cell")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds for all; the rest waits")
    parser.add_argument("--again", action="store_true", help="also run the cells that the file has")
    parser.add_argument("--extra", default="", help="options for every rehearsal, such as '--layers 2'")
    parser.add_argument("--plot", type=Path, help="also draw the plan against rehearsals, into this file")
    parser.add_argument("--page", type=Path, help="also put the tables into this page, between its marks")
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.wait:
        wait()
        return 0
    result = load(arguments.file)
    cells = [of for group in filter(None, arguments.groups.split(",")) for of in cells_of(group)]
    wanted = [of for of in cells if _named(of, arguments.only)]
    if arguments.without:
        wanted = [of for of in wanted if not _named(of, arguments.without)]
    if wanted:
        with closing(Waiting()) as waiting:
            run_all(wanted, result, arguments, waiting)
    if arguments.plot:
        plot(result["cells"], arguments.plot)
    if arguments.page:
        arguments.page.write_text(put_into(arguments.page.read_text(), result["cells"]))
    for table in TABLES.values():
        print(f"\n{table(result['cells'])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
