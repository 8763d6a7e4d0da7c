"""Figures carried over to code they were not measured on, because cells measured again on it repeat.

Cells measured again at HEAD, some of Ithaca among them, are compared with those committed: seconds, memory, loss and
gradient norm. Where each repeats within its spread, stale figures whose changed files are among those the cells ran
are stamped as carried over: the first stamp stays, and beside it stand the commit they are carried to and every
comparison made.

Seconds differ by 1% from card to card. A file of `benchmarks.versions` has both codes on one card: there the older
version stands for the committed cell, if it repeats it, and the newer is compared with the older.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fingerprints import changed
from benchmarks.stamps import HERE, Result, Stamp, figures_of, name_of, program_of, put, save, short, stamp_at, versions

# Of seconds, where a cell was measured once: one H200 gives a cell's seconds again within 1% on most days.
SPREAD = 0.01
# An older measurement that is further off was of other code or of a host in trouble.
MOST = 0.02
# The plan fixes memory to the byte, so committed cells repeat to a few blocks of the allocator; losses repeat wholly,
# and gradient norms to 1e-5, since kernels add in an order of their own.
FIXED = {"allocated_gib": 1e-3, "reserved_gib": 1e-2, "loss": 1e-5, "gradient_norm": 1e-4}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A value of one cell: the committed one and the repeated measurement."""

    cell: str
    value: str
    committed: float
    again: float
    spread: float

    @property
    def difference(self) -> float:
        return self.again / self.committed - 1

    @property
    def repeats(self) -> bool:
        return abs(self.difference) <= self.spread

    def __str__(self) -> str:
        verdict = "repeats" if self.repeats else "does not repeat"
        return (
            f"{self.cell}: {self.value} {self.committed:.6g}, again {self.again:.6g}, "
            f"{self.difference:+.2%} (spread {self.spread:.2%}): {verdict}"
        )


def spread_of(cell: Result, again: Result, earlier: list[Result]) -> float:
    """Return the relative spread of a cell's seconds: of its timed steps, and of earlier measurements of it on the same
    plan. Steps of one process alone say little of another process, so a cell without earlier ones has SPREAD at least."""
    steps = max(_range(one.get("steps_s", [])) for one in (cell, again))
    same = [one["seconds"] for one in earlier if _same_plan(one, cell)]
    history = [s for s in same if s != cell["seconds"] and abs(s / cell["seconds"] - 1) <= MOST]
    return min(MOST, max(steps, _range([*history, cell["seconds"]]) if history else SPREAD))


def _same_plan(one: Result, cell: Result) -> bool:
    if "seconds" not in one or ("allocated_gib" in one) != ("allocated_gib" in cell):
        return False
    # A floor has no plan, and no memory.
    known = "allocated_gib"
    return known not in cell or bool(abs(one[known] / cell[known] - 1) <= FIXED[known])


def _range(values: list[float]) -> float:
    return max(values) / min(values) - 1 if values else 0.0


def compare(committed: Result, again: Result, earlier: list[Result]) -> list[Comparison]:
    """Return what there is to compare of the cells measured again, or end with a sentence where that says nothing."""
    found = []
    here = {name_of(cell): cell for cell in committed["cells"]}
    cells = again.get("cells", [])
    if not any(cell.get("system") == "ithaca" for cell in cells):
        raise SystemExit("the file of --again has no cell of Ithaca to compare: measure one by benchmarks.step")
    others = {_plain_name(cell): cell for cell in cells if cell.get("version", HERE) != HERE}
    reserved = _spread_of_reserved([(here[name], other) for name, other in others.items() if name in here])
    for cell in cells:
        name = _plain_name(cell)
        if cell.get("version", HERE) != HERE:
            continue
        if name not in here:
            raise SystemExit(f"{name} is not among the committed cells: {'; '.join(here)}")
        old = here[name]
        devices = [result["runs"][one["run"]].get("device") for result, one in ((committed, old), (again, cell))]
        if devices[0] != devices[1]:
            raise SystemExit(
                f"{name} was measured on {devices[0]} and again on {devices[1]}: measure on the same device"
            )
        beside = others.get(name, old)
        if ended := [one["outcome"] for one in (old, beside, cell) if one["outcome"] != "done"]:
            raise SystemExit(f"{name}: {ended[0]}: nothing to compare")
        if beside is not old:
            # Another card's seconds say that it is the same plan and the same work, no more.
            found += _values(f"{name}, {beside['version']}", old, beside, {"seconds": MOST, "reserved_gib": reserved})
        past = [one for result in earlier for one in result.get("cells", []) if name_of(one) == name]
        seconds = spread_of(beside, cell, past if beside is old else [])
        found += _values(name, beside, cell, {"seconds": seconds, "reserved_gib": reserved})
    return found


def _spread_of_reserved(pairs: list[tuple[Result, Result]]) -> float:
    """Return the largest difference between what one code reserved in two processes: the pages that the allocator maps
    depend on when a copy to the host has ended."""
    name = "reserved_gib"
    found = [_range([old[name], again[name]]) for old, again in pairs if name in old and name in again]
    return max([FIXED[name], *found])


def _plain_name(cell: Result) -> str:
    return name_of({key: value for key, value in cell.items() if key != "version"})


def _values(name: str, old: Result, new: Result, measured: dict[str, float]) -> list[Comparison]:
    spreads = {"seconds": SPREAD} | FIXED | measured
    return [Comparison(name, v, old[v], new[v], s) for v, s in spreads.items() if v in old and v in new]


def ran(root: Path, again: Result) -> tuple[str, dict[str, str]]:
    """Return HEAD and the files that the cells measured again ran, or end with a sentence where they ran others."""
    files: dict[str, str] = {}
    for name, subject, _ in figures_of("step", again):
        stamp = latest(again, name)
        if stamp is None:
            raise SystemExit(f"{name} measured again has no stamp: measure it by benchmarks.step of this code")
        if odd := changed(stamp["files"], stamp_at(root, "HEAD", subject)["files"]):
            raise SystemExit(f"{name} was measured again on other code than HEAD's: {', '.join(odd[:3])}")
        files |= stamp["files"]
    return short(root, "HEAD"), files


def latest(result: Result, name: str) -> Stamp | None:
    """Return the stamp of the code that a figure was last measured on or carried to, None without a stamp."""
    measured = result.get("measured", {})
    entry = measured.get("figures", {}).get(name)
    if entry is None:
        return None
    stamp: Stamp = measured["sources"][entry.get("carried", entry)["sources"]]
    return stamp


def not_run(then: Stamp, now: Stamp, before: list[Stamp], again: dict[str, str]) -> list[str]:
    """Return what changed between two stamps in files that the compared cells ran neither before nor again."""
    ran_before = {path for stamp in before for path in stamp["files"]}
    names = changed(then["files"], now["files"])
    return [name for name in names if name.rsplit(" (", 1)[0] not in ran_before | set(again)]


def carry(root: Path, files: list[Path], again_file: Path, step_file: Path, *, beyond: bool, only: str) -> list[str]:
    """Carry the stale figures of `files` over and return what was done, a line each. With `beyond`, figures go along
    whose changed files the cells do not run; the stamp names these files."""
    again, committed = (json.loads(file.read_text()) for file in (again_file, step_file))
    head, files_run = ran(root, again)
    compared = compare(committed, again, [result for _, result in versions(root, step_file)])
    said = [str(each) for each in compared]
    if not all(each.repeats for each in compared):
        raise SystemExit("\n".join([*said, "nothing is carried over: not every value repeats within its spread"]))
    by = {"with": again_file.name, "comparisons": [str(each) for each in compared]}
    before = [stamp for each in {each.cell for each in compared} if (stamp := latest(committed, each))]
    for file in files:
        result: dict[str, Any] = json.loads(file.read_text())
        for name, subject, _ in list(figures_of(program_of(file), result)):
            if only not in name:
                continue
            line = _carried(result, name, stamp_at(root, head, subject), by, before, files_run, beyond)
            said += [f"{file.name}, {name}: {line}"] if line else []
        save(file, result)
    return said


def _carried(
    result: Result, name: str, now: Stamp, by: dict[str, Any], before: list[Stamp], run: dict[str, str], beyond: bool
) -> str:
    """Carry one figure over and return what was done, "" where it is current."""
    stamp = latest(result, name)
    if stamp is None:
        return "not carried over, it has no stamp"
    if not changed(stamp["files"], now["files"]):
        return ""
    entry = result["measured"]["figures"][name]
    first = result["measured"]["sources"][entry["sources"]]
    odd = not_run(first, now, before, run)
    if odd and not beyond:
        return f"not carried over, the cells do not run {', '.join(odd[:3])}{' and more' if len(odd) > 3 else ''}"
    kept = {key: value for key, value in entry.items() if key not in ("sources", "carried")}
    put(result, name, first, **kept, carried={"sources": now | by} | ({"not_run": odd} if odd else {}))
    return f"carried over from {first['commit']} to {now['commit']}" + (f", beyond {len(odd)} files" if odd else "")
