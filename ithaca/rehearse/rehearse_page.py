"""The page of a rehearsal, in a terminal and as JSON; derived and predicted figures are marked as such."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ithaca.planning.terms.traffic import LINK_SHARE
from ithaca.quantities import show_bytes
from ithaca.rehearse.prediction import RehearsalRequest, kinds_of
from ithaca.rehearse.rehearsal import Rehearsed

_NAMES = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "working": "activations, buffers",
}


def page(request: RehearsalRequest, result: Rehearsed) -> RenderableType:
    """Return the page: the job, memory and time beside the plan's, exchanges between ranks."""
    parts: list[RenderableType] = [_facts(request, result), Text(""), _memory(request, result)]
    parts += [Text(""), _time(result)] if result.seconds else []
    parts += [Text(""), _exchanges(result)] if result.exchanges else []
    return Group(*parts)


def how(result: Rehearsed) -> str:
    """Return how many layers ran, and how the rest is known."""
    ran = " and ".join(str(len(each.layers)) for each in result.figures)
    whole = len(result.predicted.plan.layers)
    return f"{ran} of {whole} layers run, the rest derived" if result.derived else f"all {whole} layers run"


def _facts(request: RehearsalRequest, result: Rehearsed) -> RenderableType:
    dp, _, sp = result.degrees
    grid = Table.grid(padding=(0, 2))
    on = "the GPU here" if result.seconds else "fake tensors (no GPU here): memory only, the CPU's operators"
    rows = "one row" if result.rows == 1 else f"{result.rows} rows"
    for name, text in (
        ("rehearsed", f"rank {request.rank} of {request.world} (dp={dp}, sp={sp}) of {request.machine}, on {on}"),
        ("row", f"{result.length:,} tokens; {rows} a step for each sequence group"),
        ("layers", f"{result.predicted.plan.summary()}; {how(result)}"),
        ("peak", f"planned at the {result.predicted.target.moment}"),
    ):
        grid.add_row(Text(name, style="bold"), text)
    return grid


def _memory(request: RehearsalRequest, result: Rehearsed) -> RenderableType:
    """Return the peak beside the plan's; without a GPU, a last column has the plan for the job's own card."""
    mark, plan, here = ", derived" if result.derived else "", result.predicted, bool(result.seconds)
    table = Table(title=f"Device memory at its peak{mark}", title_justify="left")
    columns = ["", "rehearsed", "plan", "plan off by"] if here else ["", "rehearsed", "plan, on CPU", "plan off by"]
    for column in [*columns, *([] if here else [f"plan, {request.machine.device.name}"])]:
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, rehearsed: str, planned: str = "", off: str = "", target: float | None = None) -> None:
        table.add_row(
            name, rehearsed, planned, off, *([] if here else [show_bytes(target) if target is not None else ""])
        )

    kinds, target = asdict(plan.kinds), asdict(kinds_of(plan.target.allocated))
    for kind, size in asdict(result.kinds).items():
        row(_NAMES[kind], show_bytes(size), show_bytes(kinds[kind]), _off(kinds[kind], size), target[kind])
    row(
        "all",
        show_bytes(result.peak),
        show_bytes(plan.device_bytes),
        f"{result.memory_error:+.1%}",
        sum(target.values()),
    )
    for phase, peak in result.peaks.items():
        row(f"peak in {phase}", show_bytes(peak))
    total = plan.memory.device_bytes
    reserved = (show_bytes(result.reserved), _off(total, result.reserved)) if here else ("not known", "")
    row("reserved by the allocator", reserved[0], show_bytes(total), reserved[1], plan.target.device_bytes)
    host = plan.memory.host_bytes
    row("host", show_bytes(result.host), show_bytes(host), _off(host, result.host), plan.target.host_bytes)
    row("host, pinned by the driver", show_bytes(result.pinned))
    return table


def _time(result: Rehearsed) -> RenderableType:
    plan = result.predicted
    mark = ", derived" if result.derived else ""
    table = Table(title=f"One step, seconds{mark}", title_justify="left")
    for column in ("", "rehearsed", "plan", "plan off by"):
        table.add_column(column, justify="left" if not column else "right")
    for phase, seconds in result.seconds.items():
        table.add_row(phase, f"{seconds:.2f}", "", "")
    assert result.compute_s is not None
    planned = "" if plan.compute_s is None else f"{plan.compute_s:.2f}"
    off = "" if result.time_error is None else f"{result.time_error:+.1%}"
    table.add_row("computing, all", f"{result.compute_s:.2f}", planned, off)
    if plan.step_s is not None and plan.compute_s is not None and result.step_s is not None:
        exposed = plan.step_s - plan.compute_s
        table.add_row("traffic without overlap (predicted)", f"{exposed:.2f}", f"{exposed:.2f}", "")
        table.add_row("the step", f"{result.step_s:.2f}", f"{plan.step_s:.2f}", _off(plan.step_s, result.step_s))
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


def as_json(request: RehearsalRequest, result: Rehearsed) -> dict[str, Any]:
    """Return the request, the result and the versions as plain values."""
    import torch

    machine = request.machine
    return {
        "model": request.run.model.name,
        "here": torch.cuda.get_device_name() if torch.cuda.is_available() else "fake tensors",
        "torch": torch.__version__,
        "machine": {"device": machine.device.name, "gpus": machine.gpus, "nodes": machine.nodes}
        | {"host_memory": machine.host_memory, "measured": machine.device.measured},
        "world": request.world,
        "rank": request.rank,
        "cap": request.cap,
        "budget": request.run.memory.budget,
        "on_host": request.run.memory.on_host,
        "optimizer": request.run.optimizer.name,
        "precision": request.run.precision,
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
