"""Tables and the plot of `benchmarks.rehearsals`, made from its JSON; `benchmarks.pages` puts the tables into the page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rehearsal_cells import PUBLISHED, Cell, cells_of, key, name_of, short_name
from benchmarks.step import show_length

GB = 1e9


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
    changed = [name_of(c).split(": ")[1] for c in done if c["outcome"] == "done" and not c["planned_so_today"]]
    later = f"Today's plan differs from the one that ran, and that is shown: {'; '.join(changed)}." if changed else ""
    return "\n".join([_markdown(heads, rows), "", *filter(None, [*worst, rest, later])])


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
            # Within a decade two of these would be all there is to read.
            side.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[1] > 10 * ends[0] else (1, 2, 3, 4, 5, 7)))
            side.set_minor_locator(NullLocator())
            side.set_major_formatter(StrMethodFormatter("{x:g}"))
        if points:
            axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)
