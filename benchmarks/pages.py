"""Tables of README.md and docs/, made from the committed results and put between markers.

    python -m benchmarks.pages                # names the tables that are not what the results give
    python -m benchmarks.pages --write        # puts them into the pages

A page has `<!-- begin: NAME -->` and `<!-- end: NAME -->` around a table of that name; text between is replaced.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from benchmarks import longest, losses, reach, rehearsal_page, trainer_peer
from benchmarks.stamps import HERE, RESULTS, ROOT
from benchmarks.step import cell_of, short

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
# What the README calls the systems of benchmarks.step, in the order of its rows.
SYSTEMS = {
    "transformers": "transformers, checkpointing, SDPA",
    "liger": "transformers + Liger",
    "alst-fa2": "DeepSpeed ALST, FlashAttention-2",
    "alst-cudnn": "DeepSpeed ALST, cuDNN attention",
    "transformers-fa4": "transformers, checkpointing, FlashAttention-4",
    "liger-fa4": "transformers + Liger, FlashAttention-4",
    "alst-fa4": "DeepSpeed ALST, FlashAttention-4",
    "ithaca": "**Ithaca**",
    "floor": "attention and matrix products alone",
}
OPTIMIZERS = {"adamw": "AdamW", "adamw8bit": "8-bit AdamW"}
# Budgets above are all of the card: a row of their own.
FREE_GIB = 128.0


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / RESULTS / f"{name}.json").read_text())
    return found


def markdown(rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table whose first row is the heading."""
    heading, *rest = ("|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in rows)
    return "\n".join([heading, "|" + "---|" * (heading.count("|") - 1), *rest])


def steps(found: dict[str, Any]) -> str:
    """Return one step of Ithaca and its peers: systems down, models and lengths across; Ithaca beside the floor."""
    cells = found["cells"]
    columns = list(dict.fromkeys(cell_of(c) for c in sorted(cells, key=lambda c: (c["model"] != "8B", c["length"]))))
    floor = {cell_of(c): c["seconds"] for c in cells if c["system"] == "floor"}
    rows: dict[str, dict[str, str]] = {}
    for system, name in SYSTEMS.items():
        own = [c for c in cells if c["system"] == system]
        if not own:
            continue
        if system == "ithaca":
            for free in (False, True):
                told = [c for c in own if (c["settings"]["budget_gib"] >= FREE_GIB) == free]
                told.sort(key=lambda c: columns.index(cell_of(c)))
                row = {cell_of(c): f"**{short(c)}**, {c['seconds'] / floor[cell_of(c)]:.2f}x" for c in told}
                budgets = [f"{c['settings']['budget_gib']:.0f}" for c in told]
                rows[f"{name}, budget {_and(budgets)} GiB"] = row
        else:
            rows[name] = {cell_of(c): short(c) for c in own}
    return markdown([["", *columns], *([name, *(row.get(c, "") for c in columns)] for name, row in rows.items())])


def _and(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def longest_steps(found: dict[str, Any]) -> str:
    """Return the longest training steps: those that ran, and those derived from fewer layers, marked so."""
    rows = [(cell, "", "") for cell in found["cells"] if "whole" not in cell]
    rows += [
        (cell, f", derived from {cell['from']} layer{'s' * (cell['from'] > 1)}", "planned ")
        for cell in longest.derived(found)
    ]
    rows.sort(key=lambda row: (-SIZES.index(row[0]["model"]), row[0]["length"]))
    heading = ("", "tokens", "a step", "device", "pinned on the host")
    return markdown(
        [
            heading,
            *(
                (
                    f"{cell['model']}, {OPTIMIZERS[cell['settings']['optimizer']]}",
                    f"{cell['length']:,}",
                    f"{cell['seconds']:.1f} s{derived}",
                    f"{planned}{cell['allocated_gib']:.1f} GiB",
                    f"{planned}{cell['pinned_gib']:.1f} GiB",
                )
                for cell, derived, planned in rows
            ),
        ]
    )


SIZES = ("1B", "3B", "8B")


def training_run(found: dict[str, Any]) -> str:
    """Return the runs through `ithaca train`: speed, utilisation, loss and memory."""
    rows = [("", "tokens/s", "utilisation", "loss", "peak memory")]
    for name, key in (("quiet host", "run"), ("slow and uneven host", "run_on_a_slow_host")):
        run = found[key]
        taken, middle = run["taken"], run["median"]
        rows.append(
            (
                f"{len(taken)} steps at {run['length']:,} tokens, {name}",
                f"{middle['tokens_per_second']:,.0f}",
                f"{middle['utilisation']:.1%}",
                f"{taken[0]['loss']:.2f} to {taken[-1]['loss']:.2f}",
                f"{run['memory_gib']['peak']:.1f} GiB",
            )
        )
    return markdown(rows)


def training_overhead(found: dict[str, Any]) -> str:
    """Return what the trainer adds to a bare loop, with the host ahead of the device and behind."""
    rows = [("", "bare loop", "added to it", "added to one that divides", "outside forward, backward and optimizer")]
    parts = {
        "host ahead of the device": "overhead",
        "a minute after the start": "overhead_at_start",
        "slow host": "overhead_on_a_slow_host",
    }
    for name, key in parts.items():
        one = found[key]
        between = f"{one['between']:.1%}" if "between" in one else ""
        rows.append((name, f"{one['bare_s'] * 1e3:.0f} ms", f"{one['overhead']:.1%}", f"{one['outside']:.1%}", between))
    return markdown(rows)


def claims() -> str:
    """Return every claim with its figure and where the figure comes from."""
    parity = [
        (
            "loss, logits, every gradient against one process, fp64",
            "within 1e-10",
            "CPU ranks over gloo, `tests/parity`",
        ),
        ("20 clipped AdamW steps, fp32", "losses within 1e-5", "CPU ranks over gloo"),
    ]
    heading = ("claim", "result", "ran on")
    return markdown([heading, *parity, *_attention_claims(), *_exact_claims(), *_training_claims(), *_plan_claims()])


Claim = tuple[str, str, str]
CARD, SAME_FILE = "one H200", "one H200, same file"


def _link(name: str) -> str:
    return f"[{name}.json](benchmarks/results/{name}.json)"


def _attention_claims() -> list[Claim]:
    """Return the claims about kernels and the exchange."""
    kernels, ulysses = result("kernels"), result("ulysses")
    worst_kernel = max(max(row["ratios"].values()) for row in kernels["rows"] if "ratios" in row)
    worst_shared = max(row["worst"] for name in ("shared_2", "shared_4") for row in ulysses[name])
    shares = [row[key] for row in ulysses["pack"] for key in row if key.endswith("_share")]
    return [
        (
            "bf16 error of each kernel against one device's",
            f"at most {worst_kernel:.2f}x",
            f"{CARD}, torch 2.11, {_link('kernels')}",
        ),
        (
            "the same through the exchange, 2 and 4 ranks",
            f"at most {worst_shared:.2f}x",
            f"{CARD} shared over gloo, {_link('ulysses')}",
        ),
        (
            "packing and unpacking for the exchange",
            f"{min(shares) * 100:.0f} to {max(shares) * 100:.0f}% of a plain copy",
            SAME_FILE,
        ),
        ("what Ulysses adds to the kernel at sp=1, 32K tokens", f"{ulysses['overhead']['ratio'] - 1:.1%}", SAME_FILE),
        ("the NCCL path", "a world of one", SAME_FILE),
    ]


def _exact_claims() -> list[Claim]:
    """Return the claims about attention and the loss at long lengths, against fp32."""
    cells = result("exact")["cells"]
    pairs = [(cell["error"][name], cell["flash_error"][name]) for cell in cells for name in cell["error"]]
    lengths = [cell["length"] // 1024 for cell in cells]
    return [
        (
            f"out, dq, dk, dv of sampled rows against fp32, {min(lengths)}K to {max(lengths):,}K tokens",
            f"{max(own for own, _ in pairs):.2%} of the largest value at most, "
            f"{max(own / flash for own, flash in pairs):.2f}x FlashAttention's",
            f"{CARD}, {_link('exact')}",
        ),
        (
            "the loss over all those tokens, tiled, against fp32",
            f"within {max(cell['loss_error']['loss'] for cell in cells):.1e}",
            SAME_FILE,
        ),
    ]


def _training_claims() -> list[Claim]:
    """Return the claims about runs of `ithaca train`."""
    training = result("training")
    run, added = training["run"], training["overhead"]
    return [
        (
            f"{len(run['taken'])} steps of a {run['model']} at {run['length'] // 1024}K through `ithaca train`",
            f"{run['median']['tokens_per_second']:,.0f} tokens/s, {run['median']['utilisation']:.1%} utilisation",
            f"{CARD}, {_link('training')}",
        ),
        (
            f"what the trainer adds to a bare loop, {added['model']} at {added['length'] // 1024}K, "
            f"{added['bare_s'] * 1e3:.0f} ms a step",
            f"{added['overhead']:.1%}",
            SAME_FILE,
        ),
    ]


def _plan_claims() -> list[Claim]:
    """Return the claims about rehearsals and the plans made for them."""
    rehearsed = result("rehearsals")["cells"]
    [whole] = [c for c in rehearsed if c["group"] == "whole"]
    planned = [c for c in rehearsed if c["group"] == "plan"]
    memory, time = (max(abs(c[error]) for c in planned) for error in ("memory_error", "time_error"))
    return [
        (
            f"one rank of {rehearsal_page.short_name(whole)} over {NUMBERS[whole['sp']]} at {whole['length']:,} tokens, "
            "every layer, states on the host",
            f"{whole['step_s']:.1f} s a step, {whole['reserved'] / 1e9:.1f} GB reserved",
            f"{CARD}, exchanges predicted, {_link('rehearsals')}",
        ),
        (
            f"the plan against {len(planned)} rehearsals, 32K to 1M tokens",
            f"memory within {memory:.1%}, time within {time:.1%}",
            SAME_FILE,
        ),
    ]


DOCUMENTS = {"2048": "documents of 2,048 tokens", "log-normal": "documents of random lengths"}


def other_kernel(found: dict[str, Any], without: Iterable[dict[str, Any]]) -> str:
    """Return steps with FlashAttention-4 beside the same steps without it, those measured last first in `without`."""
    rows = [("", "budget", "without it", "with it", "")]
    cells = [cell for each in without for cell in each["cells"] if cell.get("version", HERE) == HERE]
    for cell in sorted(found["cells"], key=lambda c: (len(c["settings"]), c["model"] != "8B", c["length"])):
        same = [c for c in cells if all(c[key] == cell[key] for key in ("system", "model", "length", "settings"))]
        told = DOCUMENTS.get(cell["settings"].get("documents", ""))
        share = 1 - cell["seconds"] / same[0]["seconds"]
        rows.append(
            (
                cell_of(cell) + (f", {told}" if told else ""), f"{cell['settings']['budget_gib']:.0f} GiB",
                f"{same[0]['seconds']:.2f} s", f"**{cell['seconds']:.2f} s**", f"{share:.0%} less",
            )
        )  # fmt: skip
    return markdown(rows)


NUMBERS = {2: "two", 4: "four", 8: "eight"}
TABLES: dict[str, Callable[[], str]] = {
    "steps": lambda: steps(result("step")),
    "longest steps": lambda: longest_steps(result("longest")),
    "reach": lambda: reach.table(result("reach")),
    "claims": claims,
    "flashattention-4": lambda: other_kernel(result("fa4"), map(result, ("versions", "documents", "step"))),
    "losses": lambda: losses.table(result("losses")),
    "trainers": lambda: trainer_peer.table(result("trainer_peer")),
    "training run": lambda: training_run(result("training")),
    "training overhead": lambda: training_overhead(result("training")),
    **{
        f"rehearsals {name}": partial(lambda table: table(result("rehearsals")["cells"]), table)
        for name, table in rehearsal_page.TABLES.items()
    },
}


def put(page: str, name: str, table: str) -> str:
    """Return the page with the table between its markers; a page without them stays as it is."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    return re.sub(f"{begin}\n.*?{end}", lambda _: f"{begin}\n{table}\n{end}", page, flags=re.DOTALL)


def names_in(page: str) -> list[str]:
    """Return the names of the tables that a page has markers for."""
    return re.findall(r"<!-- begin: (.+?) -->", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    write = parser.parse_args().write
    differ = []
    for path in (ROOT / page for page in PAGES):
        before = after = path.read_text(encoding="utf-8")
        for name in names_in(before):
            if name in TABLES and (made := put(after, name, TABLES[name]())) != after:
                differ.append(f"{path.relative_to(ROOT)}: {name}")
                after = made
        if write and after != before:
            path.write_text(after, encoding="utf-8")
    print("\n".join(differ) or "all tables are what the results give")
    return int(bool(differ) and not write)


if __name__ == "__main__":
    raise SystemExit(main())
