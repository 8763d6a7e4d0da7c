"""List of the figures in benchmarks/results whose code changed after the measurement.

    python -m benchmarks.stale                                  # a table: file, figure, commit, state
    python -m benchmarks.stale --check                          # the same, and exit status 1 where any is stale
    python -m benchmarks.stale --stamp step.json 1a2b3c4        # figures of a file, stamped with a commit's sources
    python -m benchmarks.stale --stamp step.json history        # each with the commit that brought it into the history
    python -m benchmarks.stale --carry step.json longest.json --again new.json

A figure is current where the source files of its subject (`benchmarks.stamps`) do what they did when it was measured:
docstrings, comments, imports and formatting do not count, nor does a file's place. To carry figures over to code that
has changed, measure some of step.json's cells again at HEAD into another file, by benchmarks.step, and hand it to
--again (`benchmarks.carried`): only where each repeats within its spread are the others stamped, and marked as carried.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.carried import carry, latest
from benchmarks.fingerprints import changed, on_disk
from benchmarks.stamps import (
    PARTS,
    RESULTS,
    ROOT,
    SUBJECTS,
    came_at,
    figures_of,
    program_of,
    put,
    save,
    short,
    stamp_at,
)  # fmt: skip

# Of the files that made a figure stale, so many are named in the table; --json names all.
NAMED = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """One committed figure, and how it stands to the code on disk."""

    file: str
    figure: str
    subject: str
    state: str
    commit: str | None = None
    from_history: bool = False
    changed: tuple[str, ...] = ()
    carried: dict[str, Any] | None = None

    def __str__(self) -> str:
        if self.state == "no stamp":
            return "no stamp: not known on which code it was measured"
        said = self.state
        if self.carried:
            values = len(self.carried["comparisons"])
            said += (
                f", carried over from {self.commit} to {self.carried['commit']}: {values} values measured again repeat"
            )
            if odd := self.carried["not_run"]:
                said += f" (which do not run {_short(odd)})"
        return said + (f": {_short(self.changed)}" if self.changed else "")


def _short(paths: tuple[str, ...] | list[str]) -> str:
    more = len(paths) - NAMED
    return ", ".join(paths[:NAMED]) + (f" and {more} more" if more > 0 else "")


def judged(root: Path, file: Path) -> list[Figure]:
    """Return the figures of a result, judged by the code on disk."""
    result = json.loads(file.read_text())
    return [
        _judged(root, file.name, name, subject, result) for name, subject, _ in figures_of(program_of(file), result)
    ]


def _judged(root: Path, file: str, name: str, subject: str, result: dict[str, Any]) -> Figure:
    stamp = latest(result, name)
    if stamp is None:
        return Figure(file, name, subject, "no stamp")
    measured, entry = result["measured"], result["measured"]["figures"][name]
    odd = tuple(changed(stamp["files"], on_disk(root, SUBJECTS[subject])))
    carried = None
    if "carried" in entry:
        carried = {key: stamp[key] for key in ("commit", "with", "comparisons")}
        carried["not_run"] = entry["carried"].get("not_run", [])
    return Figure(
        file, name, subject, "stale" if odd else "current", measured["sources"][entry["sources"]]["commit"],
        "from_history" in entry, odd, carried,
    )  # fmt: skip


def table(figures: list[Figure]) -> str:
    """Return a line for all figures of a file that stand alike, with the name of one that stands alone."""
    groups: dict[tuple[str, str, str], list[Figure]] = {}
    for each in figures:
        commit = (each.commit or "-") + (" (from history)" if each.from_history else "")
        groups.setdefault((each.file, commit, str(each)), []).append(each)
    rows = [("file", "figure", "measured at", "state")]
    for (file, commit, state), alike in groups.items():
        rows.append((file, alike[0].figure if len(alike) == 1 else f"{len(alike)} figures", commit, state))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*(text.ljust(w) for text, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
    count = {state: sum(each.state == state for each in figures) for state in ("current", "stale", "no stamp")}
    return "\n".join([*lines, ", ".join(f"{number} {state}" for state, number in count.items())])


def stamp(root: Path, file: Path, commit: str, only: str) -> int:
    """Stamp the figures of a file whose names contain `only` with the sources at a commit, and return their number."""
    result = json.loads(file.read_text())
    chosen = [(name, subject) for name, subject, _ in figures_of(program_of(file), result) if only in name]
    if not chosen:
        raise SystemExit(f"no figure of {file.name} has {only!r} in its name")
    found = came_at(root, file) if commit == "history" else dict.fromkeys((name for name, _ in chosen), commit)
    for name, subject in chosen:
        if name not in found:
            raise SystemExit(f"{file.name}, {name}: its value is not in the history yet, commit it first")
        sources = stamp_at(root, found[name], subject)
        if not sources["files"]:
            raise SystemExit(f"{found[name][:12]} has no file of {subject}: {', '.join(SUBJECTS[subject])}")
        put(result, name, sources, from_history=True)
    save(file, result)
    return len(chosen)


def resolved(root: Path, name: str) -> Path:
    """Return the path of a result that is named in short or by a path."""
    file = next((path for path in (root / RESULTS / name, Path(name)) if path.is_file()), None)
    if file is None:
        there = ", ".join(path.name for path in sorted((root / RESULTS).glob("*.json")))
        raise SystemExit(f"{name} is not there: name a file of {RESULTS}: {there}")
    if program_of(file) not in PARTS:
        raise SystemExit(f"{file.name} is of no benchmark that benchmarks/stamps.py knows: {', '.join(PARTS)}")
    try:
        json.loads(file.read_text())
    except ValueError as error:
        raise SystemExit(f"{name} is no JSON: {error}") from None
    return file


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SystemExit(message)


def arguments_of(words: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stamp", nargs=2, metavar=("FILE", "COMMIT"), help="COMMIT may be: history")
    parser.add_argument("--carry", nargs="+", metavar="FILE", help="results whose stale figures are carried over")
    parser.add_argument("--again", type=Path, metavar="NEW", help="cells of step.json, measured again at HEAD")
    parser.add_argument("--beyond", action="store_true", help="carry figures of changed files that no cell runs, too")
    parser.add_argument("--only", default="", metavar="TEXT", help="figures whose name has this text")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit status 1 where a figure is stale or has no stamp")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if bool(arguments.carry) != bool(arguments.again):
        parser.error("--carry FILES and --again NEW.json go together: one is carried over because the other repeats")
    if arguments.stamp and arguments.carry:
        parser.error("--stamp and --carry are two commands: give one")
    if arguments.beyond and not arguments.carry:
        parser.error("--beyond belongs to --carry")
    if arguments.again and not arguments.again.is_file():
        parser.error(f"--again {arguments.again}: no such file")
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = arguments_of(words)
    root = arguments.root
    if arguments.stamp:
        name, commit = arguments.stamp
        file = resolved(root, name)
        try:
            commit if commit == "history" else short(root, commit)
        except subprocess.CalledProcessError:
            raise SystemExit(f"{commit} is no commit of this repository") from None
        print(f"{file.name}: {stamp(root, file, commit, arguments.only)} figures stamped")
        return 0
    if arguments.carry:
        files, step_file = [resolved(root, name) for name in arguments.carry], resolved(root, "step.json")
        done = carry(root, files, arguments.again, step_file, beyond=arguments.beyond, only=arguments.only)
        print("\n".join(done))
        return 0
    found = [
        each
        for file in sorted((root / RESULTS).glob("*.json"))
        for each in judged(root, resolved(root, file.name))
        if arguments.only in each.figure
    ]
    print(json.dumps([asdict(each) for each in found], indent=1) if arguments.json else table(found))
    return int(arguments.check and any(each.state != "current" for each in found))


if __name__ == "__main__":
    sys.exit(main())
