"""Terms of memory as lines of text: a name, a number, a bar and the formula, device first."""

from __future__ import annotations

from collections.abc import Sequence

from ithaca.planning.terms.step_memory import Term
from ithaca.quantities import memory_unit, show_bytes

WIDTH = 24


def explain(terms: Sequence[Term], budget: int, host_budget: int | None = None) -> str:
    """Return a line for every term; the full width of the bars is the budget."""
    device = [(term.name, term.device_bytes, term.formula) for term in terms if term.device_bytes]
    host = [(term.name, term.host_bytes, term.formula) for term in terms if term.host_bytes]
    lines = _table("device", device, budget)
    if host:
        lines += _table("host", host, host_budget)
    return "\n".join(lines)


def _table(side: str, rows: list[tuple[str, int, str]], budget: int | None) -> list[str]:
    total = sum(size for _, size, _ in rows)
    scale = max(budget or total, total, 1)
    unit, named = memory_unit(total)
    lines = [f"{name:<24}{size / unit:>8.2f}  {bar(size / scale, WIDTH):<{WIDTH}}  {rest}" for name, size, rest in rows]
    of = f" of {show_bytes(budget, 1)}" if budget else ""
    over = "" if not budget or total <= budget else f", {show_bytes(total - budget)} too much"
    return [*lines, f"{f'{side}, {named}':<24}{total / unit:>8.2f}{of}{over}"]


def bar(share: float, width: int) -> str:
    """Return a bar of blocks, to an eighth of a character; a share of 1 is `width` characters."""
    full, part = divmod(round(share * width * 8), 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[part].strip()
