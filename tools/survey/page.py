"""Generator of `docs/architectures.md` from the verdict table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tools.survey.static import CAUSES

_OPENING = """\
# Architectures

<!-- Generated from ithaca/planning/model/architectures.json by `python -m tools.survey.survey --write`: do not edit. -->

Every causal language model type of transformers {transformers} (and the text parts of those that have several parts),
measured with torch {torch}: {exact} exact, {refused} refused. *Exact* means that a small model of that type, in fp64,
gives the loss, the logits and every gradient of one process with transformers' eager attention to within {tolerance:g},
with its sequence split over 2 and over 4 ranks: on a plain batch of odd length, on right-padded and left-padded batches,
on a packed row (against its documents one by one), and with the router's auxiliary loss where there is one. Windows are
shorter than the rows, caps and sinks are on; each type is measured as its config's own defaults have it, and again with
what those leave off, over 2 ranks: biases, norms of queries and keys, multipliers that are not 1, tied or untied
embeddings, keys and values that layers share, heads of another size in some layers.
What is not exact is refused by name before anything runs.

*Recompute* says whether the same holds with the MLP and the loss in tiles and with layers recomputed in the backward
pass, one in two of them with its attention. Where it says so, train with `memory=None`: autograd keeps everything.
"""


def page(table: dict[str, Any]) -> str:
    """Return the whole page as Markdown."""
    measured = {kind: row for kind, row in table["architectures"].items() if "verdict" in row}
    rows: dict[str, dict[str, Any]] = {kind: row["verdict"] for kind, row in measured.items()}
    exact = {kind: row for kind, row in rows.items() if row["verdict"] == "exact"}
    refused = {kind: row for kind, row in rows.items() if row["verdict"] != "exact"}
    versions = {key: table[key] for key in ("transformers", "torch", "tolerance")}
    opening = _OPENING.format(**versions, exact=len(exact), refused=len(refused))
    parts = [opening, "## Exact\n", _exact(exact), "## Refused\n"]
    for cause, about in CAUSES.items():
        with_cause = {kind: row for kind, row in refused.items() if row["cause"] == cause}
        if with_cause:
            parts += [f"### {about.heading}\n", _refused(with_cause)]
    return "\n".join(parts)


def _exact(rows: dict[str, dict[str, Any]]) -> str:
    cells = (
        (
            f"`{kind}`",
            row["classes"],
            row["features"] + (", experts" if row["experts"] else ""),
            f"{row['worst']:.0e}",
            _escaped(_recompute(row["memory"])),
        )
        for kind, row in rows.items()
    )
    return _table(("Type", "Class", "Exercised", "Worst error", "Recompute"), cells)


def _recompute(measured: str) -> str:
    """Return what a reader needs of the measured line: "exact", or that only `memory=None` is, and why.

    "plain: UnsupportedError: ... (_no_split_modules): use memory=None" is such a line; its first word is the batch's.
    """
    if measured == "exact":
        return measured
    batch, _, error = measured.partition(": ")
    kind, _, why = error.partition(": ")
    held = "no auxiliary loss of the router" if batch == "router loss" else "only `memory=None`"
    ours = kind == "UnsupportedError"
    return f"{held}: " + (why.removesuffix(": use memory=None") if ours else "a layer fails when recomputed")


def _refused(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table with a line for each reason: types with equal reasons share a line."""
    by_reason: dict[str, list[str]] = {}
    for kind, row in rows.items():
        reason = _escaped(row["reason"])
        if "exact_without" in row:
            reason += f". Exact without {row['exact_without']}"
        by_reason.setdefault(reason, []).append(f"`{kind}`")
    return _table(("Types", "Why"), ((", ".join(kinds), reason) for reason, kinds in by_reason.items()))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
