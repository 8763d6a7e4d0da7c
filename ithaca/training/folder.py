"""The run's folder: where its files are, who may write there, and whether a run found there is this one.

    run.yaml  metrics.jsonl  checkpoints/  stages/  export/  loss.png  lock

Invariant: one job at a time. The lock is the operating system's, held by the first rank, so it ends with the process,
however that ends. A folder that holds a run is resumed only by a run that learns the same.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from ithaca.config import Run, dump_run, read_run
from ithaca.errors import ConfigError

# What may differ when a run is resumed: where and how it runs, not what it learns.
_FREE = ("mesh", "memory", "checkpoints", "metrics", "limits", "launch", "output", "validation")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def settings(self) -> Path:
        return self.root / "run.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def picture(self) -> Path:
        return self.root / "loss.png"

    def stage(self, number: int, length: int) -> Path:
        """Where stage `number` (from 0) leaves its model."""
        return self.root / "stages" / f"{number + 1}-{length}"

    def put(self, target: Path, write: Callable[[Path], object]) -> None:
        """Have a folder written whole or not at all; one that is there stays."""
        if target.exists():
            return
        part = target.with_name(f".{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        part.rename(target)

    def name_last(self, number: int, length: int) -> None:
        """`export/` is the last stage's model."""
        target = self.stage(number, length).relative_to(self.root)
        if self.export.is_symlink():
            self.export.unlink()
        self.export.symlink_to(target, target_is_directory=True)

    def lock(self) -> IO[str]:
        """Hold the folder; keep what is returned open for as long as the run lives."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            held = (self.root / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"output {self.root} cannot be written ({error.strerror}): set output=...") from None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.close()
            raise ConfigError(
                f"{self.root} is in use by another run: wait for it to end, or set output=... to another folder"
            ) from None
        return held

    def settle(self, run: Run) -> None:
        """Refuse a folder that holds another run; else leave the resolved settings there."""
        if self.settings.exists():
            before = read_run(yaml.safe_load(self.settings.read_text(encoding="utf-8")))
            if (self.checkpoints).exists() and (named := difference(before, run)):
                raise ConfigError(
                    f"{self.root} holds a run with another {named}: set output=... to a new folder, or put {named} back"
                )
        self.settings.write_text(dump_run(run), encoding="utf-8")


def difference(before: Run, now: Run) -> str | None:
    """The first setting in which two runs would learn otherwise; stages may be added, and may change their sp."""
    old, new = before.model_dump(), now.model_dump()
    for key in old:
        if key not in (*_FREE, "stages") and old[key] != new[key]:
            return _inside(key, old[key], new[key])
    for at, (a, b) in enumerate(zip(old["stages"], new["stages"], strict=False)):
        changed = [name for name in a if name != "sp" and a[name] != b[name]]
        if changed:
            return f"stages.{at}.{changed[0]}"
    return None if len(new["stages"]) >= len(old["stages"]) else f"stages.{len(new['stages'])}"


def _inside(key: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        return next(f"{key}.{name}" for name in old if old[name] != new[name])
    return key
