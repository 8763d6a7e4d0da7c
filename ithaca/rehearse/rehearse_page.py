"""How a rehearsal looks: in a terminal, and as JSON. What was derived or predicted says so."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ithaca.planning.terms.traffic import LINK_SHARE
from ithaca.quantities import show_bytes
from ithaca.rehearse.rehearsal import Asked, Rehearsed, kinds_of

_NAMES = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "working": "activations, buffers",
}


def page(asked: Asked, result: Rehearsed) -> RenderableType:
    """Facts, then memory and time beside the plan's, then what travels."""
    parts: list[RenderableType] = [_facts(asked, result), Text(""), _memory(asked, result)]
    parts += [Text(""), _time(result)] if result.seconds else []
    parts += [Text(""), _exchanges(result)] if result.exchanges else []
    return Group(*parts)


def how(result: Rehearsed) -> str:
    """What ran, and how the rest is known."""
    ran = " and ".join(str(len(each.layers)) for each in result.figures)
    whole = len(result.predicted.plan.layers)
    return f"{ran} of {whole} layers run, the rest derived" if result.derived else f"all {whole} layers run"


def _facts(asked: Asked, result: Rehearsed) -> RenderableType:
    dp, _, sp = result.degrees
    grid = Table.grid(padding=(0, 2))
    on = "the GPU here" if result.seconds else "fake tensors (no GPU here): memory only, the CPU's operators"
    for name, text in (
        ("rehearsed", f"rank {asked.rank} of {asked.world} (dp={dp}, sp={sp}) of {asked.machine}, on {on}"),
        ("row", f"{result.length:,} tokens, {result.rows} a sequence group and step"),
        ("layers", f"{result.predicted.plan.summary()}; {how(result)}"),
        ("worst", f"as planned, at the {result.predicted.target.moment}"),
    ):
        grid.add_row(Text(name, style="bold"), text)
    return grid


def _memory(asked: Asked, result: Rehearsed) -> RenderableType:
    """The peak beside the plan's; where other operators ran than the job's, last what the plan says of the job's own."""
    mark, said, here = ", derived" if result.derived else "", result.predicted, bool(result.seconds)
    table = Table(title=f"Device memory at its peak{mark}", title_justify="left")
    columns = ["", "rehearsed", "plan", "plan off by"] if here else ["", "rehearsed", "plan, on CPU", "plan off by"]
    for column in [*columns, *([] if here else [f"plan, {asked.machine.device.name}"])]:
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, of: str, plan: str = "", off: str = "", target: float | None = None) -> None:
        table.add_row(name, of, plan, off, *([] if here else [show_bytes(target) if target is not None else ""]))

    planned, target = asdict(said.kinds), asdict(kinds_of(said.target.allocated))
    for kind, size in asdict(result.kinds).items():
        row(_NAMES[kind], show_bytes(size), show_bytes(planned[kind]), _off(planned[kind], size), target[kind])
    row(
        "all",
        show_bytes(result.peak),
        show_bytes(said.device_bytes),
        f"{result.memory_error:+.1%}",
        sum(target.values()),
    )
    for phase, peak in result.peaks.items():
        row(f"peak in {phase}", show_bytes(peak))
    total = said.memory.device_bytes
    reserved = (show_bytes(result.reserved), _off(total, result.reserved)) if here else ("not known", "")
    row("reserved by the allocator", reserved[0], show_bytes(total), reserved[1], said.target.device_bytes)
    host = said.memory.host_bytes
    row("host", show_bytes(result.host), show_bytes(host), _off(host, result.host), said.target.host_bytes)
    row("host, pinned by the driver", show_bytes(result.pinned))
    return table


def _time(result: Rehearsed) -> RenderableType:
    said = result.predicted
    mark = ", derived" if result.derived else ""
    table = Table(title=f"One step, seconds{mark}", title_justify="left")
    for column in ("", "rehearsed", "plan", "plan off by"):
        table.add_column(column, justify="left" if not column else "right")
    for phase, seconds in result.seconds.items():
        table.add_row(phase, f"{seconds:.2f}", "", "")
    assert result.compute_s is not None
    planned = "" if said.compute_s is None else f"{said.compute_s:.2f}"
    off = "" if result.time_error is None else f"{result.time_error:+.1%}"
    table.add_row("computing, all", f"{result.compute_s:.2f}", planned, off)
    if said.step_s is not None and said.compute_s is not None and result.step_s is not None:
        shown = said.step_s - said.compute_s
        table.add_row("what shows of traffic (predicted)", f"{shown:.2f}", f"{shown:.2f}", "")
        table.add_row("the step", f"{result.step_s:.2f}", f"{said.step_s:.2f}", _off(said.step_s, result.step_s))
        speed = result.rows * result.degrees[0] * result.length / result.step_s
        table.add_row("tokens a second, whole job", f"{speed:,.0f}", "", "")
    return table


def _exchanges(result: Rehearsed) -> RenderableType:
    title = f"Exchanges of a step over {result.link} at {LINK_SHARE:.0%}: bytes counted, seconds predicted"
    table = Table(title=title, title_justify="left")
    for column in ("", "sent", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    for each in result.exchanges:
        table.add_row(each.name, show_bytes(each.bytes), f"{each.seconds:.3f}")
    return table


def as_json(asked: Asked, result: Rehearsed) -> dict[str, Any]:
    """Everything, plain."""
    import torch

    machine = asked.machine
    return {
        "model": asked.run.model.name,
        "here": torch.cuda.get_device_name() if torch.cuda.is_available() else "fake tensors",
        "torch": torch.__version__,
        "machine": {"device": machine.device.name, "gpus": machine.gpus, "nodes": machine.nodes}
        | {"host_memory": machine.host_memory, "measured": machine.device.measured},
        "world": asked.world,
        "rank": asked.rank,
        "cap": asked.cap,
        "budget": asked.run.memory.budget,
        "on_host": asked.run.memory.on_host,
        "optimizer": asked.run.optimizer.name,
        "precision": asked.run.precision,
        "how": how(result),
        "plan_summary": result.predicted.plan.summary(),
        "peak": result.peak,
        "compute_s": result.compute_s,
        "step_s": result.step_s,
        "memory_error": result.memory_error,
        "time_error": result.time_error,
    } | asdict(result)


def _off(planned: float, measured: float) -> str:
    return f"{planned / measured - 1:+.1%}" if measured else ""
