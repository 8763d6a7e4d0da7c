"""The page of a plan in a terminal: facts, memory and time as bars, lengths within reach, and the tables of `--compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ithaca.constants import GIB
from ithaca.planning.machine.hardware import Device
from ithaca.planning.search.best_mesh import Compared, Option
from ithaca.planning.search.phrases import show_length, show_used
from ithaca.planning.search.request import PlanRequest
from ithaca.planning.terms.step_memory import Term
from ithaca.planning.terms.terms_table import bar
from ithaca.planning.terms.traffic import LINK_SHARE, Machine
from ithaca.report.plan_files import launch_line, script_change

BAR, NAME, NUMBER = 20, 22, 6
LEAST_SHOWN = 0.005


def facts_of(request: PlanRequest, option: Option, name: str) -> dict[str, str]:
    """Return the request and the plan, a line each."""
    machine, job, time = request.machine, option.job, option.time
    rows = option.rows * option.degrees.dp
    tuned = f", {parameters(request.sizes.adapters)} of them trained" if request.sizes.adapters else ", all trained"
    copies = f", {job.replicas} copies of the weights" if job.replicas > 1 else ""
    return {
        "model": f"{name}, {parameters(request.sizes.total)} parameters{tuned}",
        "length": f"{job.length:,} tokens, {rows} row{'s' * (rows > 1)} a step, one document a row",
        "machine": f"{machine}, {machine.host_memory / 1e9:,.0f} GB of host memory a node, {links_of(machine)}",
        "mesh": f"{option.degrees}{show_used(machine, option.machine)}{copies}",
        "optimizer": str(option.recipe),
        "layers": option.plan.summary(),
        "step": f"{seconds(time.seconds)}, {time.tokens_per_second:,.0f} tokens/s "
        f"({time.tokens_per_second / option.machine.world:,.0f} a GPU)",
        "utilisation": f"{time.utilisation(machine.device.peak):.0%} of the card's peak; exchanges "
        f"{time.exchange_share:.1%} of the step ({time.wire_s / time.seconds:.1%} on the wire)",
        "figures": source_of(machine.device),
    }


def parameters(count: int) -> str:
    """Return a number of parameters in billions or millions."""
    unit, name = next((unit, name) for unit, name in ((1e8, "B"), (1e5, "M"), (0, "")) if count >= unit)
    return f"{count / (10 * unit):,.2f} {name}" if name else f"{count:,}"


def links_of(machine: Machine) -> str:
    between = "" if machine.nodes == 1 else f" inside, {machine.network.name} between"
    return f"{machine.link.name}{between}"


def source_of(device: Device) -> str:
    """Return the source of the figures: measured, or a data sheet."""
    if device.measured:
        return f"{device.name} measured; links from data sheets at {LINK_SHARE:.0%}"
    return f"{device.name} and links from data sheets, with the shares that an H200 was measured to reach"


def cost_of(request: PlanRequest, option: Option, tokens: int, price: float | None) -> str:
    """Return the hours, GPU-hours and price of so many tokens."""
    # Idle GPUs are paid for too.
    hours = tokens / option.time.tokens_per_second / 3600
    text = f"{tokens:,} tokens: {hours:,.1f} hours, {hours * request.machine.world:,.0f} GPU-hours"
    return text if price is None else f"{text}, {hours * request.machine.world * price:,.0f} at {price:g} a GPU-hour"


def seconds(value: float) -> str:
    if value < 0.1:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 600 else f"{value / 60:.1f} min"


def page(
    facts: dict[str, str], request: PlanRequest, option: Option, reach: Sequence[tuple[str, int]]
) -> RenderableType:
    """Return the whole page."""
    device, host = replace(request, machine=option.machine).budgets
    terms = option.memory.terms
    head = f"at the {option.memory.moment}"
    parts: list[RenderableType] = [_facts(facts), Text(), _memory("device", terms, device, request.headroom, head)]
    if option.memory.host_bytes:
        parts += [Text(), _memory("host", terms, host, request.host_headroom, "one GPU's share")]
    parts += [Text(), _time(option), Text(), _reach(reach), Text("\nIn a plain script:", style="bold")]
    change = "\n".join(f"  {line}" for line in script_change(request, option).splitlines())
    parts += [_diff(change), Text(f"  {launch_line(option.machine)}", style="dim")]
    return Group(*parts)


def _diff(text: str) -> Text:
    styled = Text(no_wrap=True, overflow="ignore")
    for line in text.splitlines():
        mark = line.lstrip()[:1]
        styled.append(line + "\n", style={"+": "green", "-": "red"}.get(mark, ""))
    styled.rstrip()
    return styled


def _facts(facts: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in facts.items():
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _bar(share: float, colour: str) -> Text:
    return Text(bar(min(share, 1.0), BAR), style=colour)


def _barred(title: str, unit: str, note: str) -> Table:
    """Return an empty table of names, numbers, bars and remarks."""
    # A remark that is too long for the terminal is cut: `--spec` and `--json` have the whole of it.
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    table.add_column(title, no_wrap=True, width=NAME)
    table.add_column(unit, justify="right", no_wrap=True, width=NUMBER)
    table.add_column("", width=BAR, no_wrap=True)
    table.add_column(note, style="dim", header_style="dim", no_wrap=True, ratio=1)
    return table


def _memory(side: str, terms: Sequence[Term], budget: int, headroom: float, note: str) -> Table:
    """Return the terms of the device or of the host; the full width of the bars is the budget."""
    sizes = [(t.name, t.device_bytes if side == "device" else t.host_bytes, t.formula) for t in terms]
    sizes = [each for each in sizes if each[1]]
    table = _barred(f"{side} memory", "GiB", note)
    colour = "cyan" if side == "device" else "magenta"
    for name, size, formula in sizes:
        table.add_row(name, f"{size / GIB:.2f}", _bar(size / budget, colour), Text(formula))
    total = sum(size for _, size, _ in sizes)
    table.add_row(
        "all", f"{total / GIB:.2f}", _bar(total / budget, "bold"), f"of {budget / GIB:.1f}, {headroom:.0%} left free"
    )
    return table


def _time(option: Option) -> Table:
    table = _barred("time of a step", "s", "")
    total = option.time.seconds
    for term in option.time.terms:
        if term.seconds >= LEAST_SHOWN * total or term.name == "exchange":
            shown = f"{term.seconds:.2f}" if total < 100 else f"{term.seconds:.1f}"
            table.add_row(term.name, shown, _bar(term.seconds / total, "yellow"), Text(term.meaning))
    table.add_row("all", f"{total:.2f}" if total < 100 else f"{total:.1f}", "", "")
    return table


def _reach(reach: Sequence[tuple[str, int]]) -> Table:
    """Return the lengths within reach; a larger machine that reaches no further `adds nothing`."""
    table = Table.grid(padding=(0, 2))
    known = [label.startswith("longest") for label, _ in reach]
    most = max(length for (_, length), is_known in zip(reach, known, strict=True) if is_known)
    for (label, length), is_known in zip(reach, known, strict=True):
        shown = show_length(length) if is_known or length > most else "adds nothing"
        table.add_row(Text(label, style="bold" if label == reach[0][0] else ""), f"{length:,} tokens", shown)
    return table


def comparison(chosen: Option, rows: Sequence[Compared]) -> Table:
    """Return a row for every mesh: its longest length and, at the requested length, its speed, exchanges and memory."""
    title = f"Every mesh of {chosen.machine}, with {chosen.recipe}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title=title)
    table.title_justify, table.title_style = "left", ""
    for name in ("dp", "ring", "sp"):
        table.add_column(name, justify="right")
    for name in ("longest", "s a step", "tokens/s", "exchange", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in rows:
        reach = show_length(row.longest) if row.longest else "-"
        table.add_row(*map(str, row.degrees), reach, *_speeds(row.option), _remark(row))
    return table


def _speeds(option: Option | None) -> tuple[str, str, str, str]:
    if option is None:
        return "-", "-", "-", "-"
    time = option.time
    memory = f"{option.memory.device_bytes / GIB:.1f}"
    return f"{time.seconds:.1f}", f"{time.tokens_per_second:,.0f}", f"{time.exchange_share:.1%}", memory


def _remark(row: Compared) -> Text:
    if row.option is None:
        return Text("too long for it" if row.longest else "does not fit", style="red")
    if row.chosen:
        return Text("chosen", style="green")
    return Text("not built yet", style="yellow") if row.degrees.ring > 1 else Text("")


def verdict(request: PlanRequest, plain: Option, rows: Sequence[Compared]) -> str:
    """Return advice between Ulysses, ring and both for this model on this machine; `plain` was chosen."""
    machine, heads = request.machine, request.sizes.heads
    rings = [row.option for row in rows if row.option is not None and not row.option.runnable]
    turning = max(rings, key=lambda option: option.time.tokens_per_second, default=None)
    lines = [
        f"Ulysses (sp) as far as it goes: up to {heads} ranks, one a head, best inside a node of {machine.gpus}. A ring "
        "beyond that, or between nodes where the network is slow; both together for more ranks than heads."
    ]
    length, share = show_length(plain.job.length), plain.time.exchange_share
    lines.append(f"Here at {length}: {plain.degrees}, exchanges {share:.1%} of the step.")
    if turning is not None:
        gain = turning.time.tokens_per_second / plain.time.tokens_per_second - 1
        lines.append(
            f"The best with a ring: {turning.degrees}, {gain:+.0%} against it; ring attention is not built yet."
        )
    far = {
        ring: max((row.longest for row in rows if (row.degrees.ring > 1) == ring), default=0) for ring in (False, True)
    }
    if far[True] > far[False]:
        lines.append(
            f"With the same optimizer and precision a ring would reach {show_length(far[True])}, "
            f"without one {show_length(far[False])}."
        )
    return "\n".join(lines)
